"""``specrag ask`` against a scripted orchestrator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from specrag.v1 import common_pb2, rag_pb2
from specrag_client import AnswerText
from specrag_common.runtime.errors import (
    Capacity,
    InternalError,
    InvalidRequest,
    NotFound,
    SessionBusy,
    UpstreamUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from specrag_common.runtime.errors import SpecragError

    from tests.client.conftest import Outcome, RagScript

    Specrag = Callable[..., Outcome]

ANSWER = "猫が🐟を食べる"

ANSWER_KEYS = {
    "answer",
    "finish_reason",
    "policy",
    "mode",
    "degraded",
    "citations",
    "passages",
    "num_dropped_passages",
    "num_dropped_turns",
    "usage",
    "stats",
    "session_id",
    "answer_id",
    "trace_id",
}
STATS_KEYS = {
    "rounds",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "time_to_first_speculative_token_ms",
    "time_to_first_token_ms",
    "total_ms",
    "tokens_per_s",
    "per_drafter",
}


def ask(*arguments: str) -> list[str]:
    return ["ask", "Who?", "--collection", "handbook", *arguments]


def test_pipe_gets_the_committed_text_and_nothing_else(
    specrag: Specrag, orchestrator: str, rag_script: RagScript
) -> None:
    outcome = specrag(*ask("--endpoint", orchestrator))
    assert outcome == type(outcome)(0, ANSWER + "\n", "")
    assert not rag_script.requests[0].include_speculative


def test_json_has_exactly_the_documented_keys(specrag: Specrag, orchestrator: str) -> None:
    outcome = specrag(*ask("--endpoint", orchestrator, "--json"))
    shown = json.loads(outcome.out)
    assert outcome.code == 0
    assert set(shown) == ANSWER_KEYS
    assert set(shown["stats"]) == STATS_KEYS
    assert set(shown["usage"]) == {"prompt_tokens", "cached_tokens", "completion_tokens"}
    assert set(shown["citations"][0]) == {
        "number",
        "chunk_id",
        "document_id",
        "title",
        "start",
        "end",
    }
    assert shown["answer"] == ANSWER
    assert (shown["policy"], shown["mode"]) == ("joint", "coupled")
    assert shown["finish_reason"] == "stop"
    assert shown["degraded"] == []
    assert shown["session_id"] is None
    assert shown["passages"][0]["number"] == 1
    assert shown["stats"]["time_to_first_token_ms"] == pytest.approx(34.568)


def test_json_has_no_first_speculative_time_when_nothing_was_speculated(
    specrag: Specrag, orchestrator: str, rag_script: RagScript
) -> None:
    rag_script.events[-1].finished.stats.ClearField("time_to_first_speculative_token_ms")
    outcome = specrag(*ask("--endpoint", orchestrator, "--json"))
    assert json.loads(outcome.out)["stats"]["time_to_first_speculative_token_ms"] is None


def test_events_are_json_lines_that_rebuild_the_answer(specrag: Specrag, orchestrator: str) -> None:
    outcome = specrag(*ask("--endpoint", orchestrator, "--events"))
    events = [json.loads(line) for line in outcome.out.splitlines()]
    assert [one["type"] for one in events] == [
        "retrieval",
        "speculative",
        "speculative",
        "retract",
        "commit",
        "speculative",
        "commit",
        "citation",
        "finished",
    ]
    assert [one["seq"] for one in events] == list(range(1, 10))
    assert rebuild(events) == events[-1]["answer"] == ANSWER


def test_characters_that_end_lines_elsewhere_are_escaped_in_event_lines(
    specrag: Specrag,
    orchestrator: str,
    rag_script: RagScript,
    make_finished: Callable[..., rag_pb2.AnswerEvent],
) -> None:
    strange = "a\u2028b\u2029c\x85d\x1ee\x0bf\rg"
    rag_script.events[1:] = [
        rag_pb2.AnswerEvent(seq=2, commit=rag_pb2.Commit(to_offset=13, text=strange)),
        make_finished(3, strange),
    ]
    outcome = specrag(*ask("--endpoint", orchestrator, "--events"))
    assert [json.loads(line)["seq"] for line in outcome.out.splitlines()] == [1, 2, 3]
    assert json.loads(outcome.out.splitlines()[1])["text"] == strange


def test_error_mid_answer_is_the_last_event_and_one_line_on_stderr(
    specrag: Specrag, orchestrator: str, rag_script: RagScript
) -> None:
    del rag_script.events[5:]
    rag_script.error = UpstreamUnavailable("verifier is gone", reason="VERIFIER_GONE")
    outcome = specrag(*ask("--endpoint", orchestrator, "--events"))
    last = json.loads(outcome.out.splitlines()[-1])
    assert (last["type"], last["seq"]) == ("error", 6)
    assert (last["code"], last["reason"]) == ("UNAVAILABLE", "VERIFIER_GONE")
    assert outcome.code == 3
    assert outcome.err == "error: verifier is gone (may succeed when tried again)\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("collection", "'X' is no name"), 2),
        (NotFound("no collection named x"), 2),
        (SessionBusy("session s has a running turn", retry_delay_s=1.0), 3),
        (Capacity("8 answers are running"), 3),
        (UpstreamUnavailable("retriever cannot be reached"), 3),
        (InternalError("look for id 7 in the log\nsecond line"), 3),
    ],
)
@pytest.mark.parametrize("output", [(), ("--json",)])
def test_refused_question_prints_one_line_and_the_right_code(
    specrag: Specrag,
    orchestrator: str,
    rag_script: RagScript,
    error: SpecragError,
    code: int,
    output: tuple[str, ...],
) -> None:
    rag_script.events, rag_script.error = [], error
    outcome = specrag(*ask("--endpoint", orchestrator, *output))
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert error.message.split("\n", maxsplit=1)[0] in outcome.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["ask", "", "--collection", "c"], "QUESTION"),
        (["ask", " \t\n", "--collection", "c"], "blank"),
        (["ask", "x" * 8193, "--collection", "c"], "8192"),
        (["ask", "\udcff", "--collection", "c"], "UTF-8"),
        (["ask", "Who?"], "--collection"),
        (["ask", "Who?", "--collection", ""], "--collection"),
        (ask("--temperature", "-1"), "--temperature"),
        (ask("--temperature", "2.5"), "--temperature"),
        (ask("--temperature", "nan"), "--temperature"),
        (ask("--temperature", "hot"), "--temperature"),
        (ask("--top-p", "0"), "--top-p"),
        (ask("--top-p", "1.5"), "--top-p"),
        (ask("--top-k", "-1"), "--top-k"),
        (ask("--min-p", "1.1"), "--min-p"),
        (ask("--repetition-penalty", "0"), "--repetition-penalty"),
        (ask("--repetition-penalty", "inf"), "--repetition-penalty"),
        (ask("--presence-penalty", "-2.1"), "--presence-penalty"),
        (ask("--frequency-penalty", "nan"), "--frequency-penalty"),
        (ask("--logit-bias", "7"), "ID=VALUE"),
        (ask("--logit-bias", "seven=1"), "ID=VALUE"),
        (ask("--logit-bias", "-7=1"), "ID=VALUE"),
        (ask("--logit-bias", "7=101"), "--logit-bias"),
        (ask("--logit-bias", "7=nan"), "--logit-bias"),
        (ask("--logit-bias", f"{2**31}=1"), "--logit-bias"),
        (ask("--logit-bias", "7=1", "--logit-bias", "7=2"), "twice"),
        (ask("--min-tokens", "-1"), "--min-tokens"),
        (ask("--logprobs", "21", "--json"), "--logprobs"),
        (ask("--logprobs", "2"), "--json or --events"),
        (ask("--seed", "-1"), "--seed"),
        (ask("--seed", str(2**64)), "--seed"),
        (ask("--max-tokens", "0"), "--max-tokens"),
        (ask("--max-tokens", "99999999999999999999"), "--max-tokens"),
        (ask("--passages", "0"), "--passages"),
        (ask("--passages", "31"), "--passages"),
        (ask("--drafters", "0"), "--drafters"),
        (ask("--drafters", "17"), "--drafters"),
        (ask("--policy", "fastest"), "--policy"),
        (ask("--json", "--events"), "not both"),
        (ask("--endpoint", "nowhere"), "HOST:PORT"),
        (ask("--endpoint", "h:1", "--dir", "d"), "not both"),
        (ask("--session", ""), "--session"),
        (ask("--unknown"), "--unknown"),
        (["asks"], "asks"),
    ],
)
def test_bad_argument_is_named_in_one_line_with_code_2(
    specrag: Specrag, arguments: list[str], named: str
) -> None:
    outcome = specrag(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert named in outcome.err


def test_every_flag_reaches_the_request(
    specrag: Specrag, orchestrator: str, rag_script: RagScript
) -> None:
    arguments = ask("--endpoint", orchestrator, "--policy", "target-only", "--session", "s1")
    arguments += ["--temperature", "0", "--top-p", "0.9", "--top-k", "40", "--seed", "7"]
    arguments += ["--max-tokens", "64", "--passages", "4", "--drafters", "3", "--tenant", "acme"]
    arguments += ["--mode", "rejection", "--stop", r"\n", "--stop", "END"]
    assert specrag(*arguments, "--json").code == 0
    request = rag_script.requests[0]
    assert request.policy == rag_pb2.ANSWER_POLICY_TARGET_ONLY
    assert (request.session_id, request.tenant, request.seed) == ("s1", "acme", 7)
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0
    assert request.sampling.top_p == pytest.approx(0.9)
    assert (request.sampling.top_k, request.sampling.max_tokens) == (40, 64)
    assert (request.num_passages, request.draft.num_drafters) == (4, 3)
    assert request.mode == common_pb2.VERIFICATION_MODE_REJECTION
    assert list(request.sampling.stop) == ["\n", "END"]


def test_unreachable_endpoint_is_a_service_error(specrag: Specrag) -> None:
    outcome = specrag(*ask("--endpoint", "127.0.0.1:1"))
    assert (outcome.code, outcome.out) == (3, "")
    assert "127.0.0.1:1" in outcome.err
    assert outcome.err.count("\n") == 1


def test_without_a_stack_the_way_out_is_named(specrag: Specrag, tmp_path: Path) -> None:
    outcome = specrag(*ask("--dir", str(tmp_path)))
    assert outcome.code == 3
    assert "specrag up" in outcome.err


def test_ctrl_c_cancels_the_answer_and_exits_130(orchestrator: str, rag_script: RagScript) -> None:
    rag_script.hold = rag_script.left
    process = start_cli(*ask("--endpoint", orchestrator))
    assert process.stdout is not None
    assert process.stderr is not None
    first = os.read(process.stdout.fileno(), 100).decode()
    assert ANSWER.startswith(first)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    assert rag_script.left.is_set()
    assert process.stderr.read().decode() == "error: interrupted\n"
    close(process)


def test_sigterm_cancels_the_answer_too(orchestrator: str, rag_script: RagScript) -> None:
    rag_script.hold = rag_script.left
    process = start_cli(*ask("--endpoint", orchestrator))
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 100)
    process.terminate()
    assert process.wait(timeout=10) == 143
    assert rag_script.left.is_set()
    close(process)


def test_reader_that_leaves_ends_the_command_quietly(
    orchestrator: str, rag_script: RagScript
) -> None:
    process = start_cli(*ask("--endpoint", orchestrator, "--events"))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=10) in {0, 141}
    assert process.stderr.read() == b""
    process.stderr.close()


def test_http_proxy_does_not_stand_before_a_local_stack(orchestrator: str) -> None:
    process = start_cli(*ask("--endpoint", orchestrator), http_proxy="http://127.0.0.1:1")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, b"")
    assert out.decode() == ANSWER + "\n"


def test_ascii_only_stdout_still_gets_valid_json(orchestrator: str) -> None:
    process = start_cli(*ask("--endpoint", orchestrator, "--json"), encoding="ascii")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, b"")
    assert json.loads(out.decode("ascii"))["answer"] == ANSWER


def test_ascii_only_stdout_still_gets_text(orchestrator: str) -> None:
    process = start_cli(*ask("--endpoint", orchestrator), encoding="ascii")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, b"")
    assert out.count(b"?") == len(ANSWER)


def rebuild(events: list[dict[str, Any]]) -> str:
    """Rebuild the text from event lines as any reader of them would."""
    text = AnswerText()
    for event in events:
        match event["type"]:
            case "speculative":
                text.append(event["offset"], event["text"])
            case "retract":
                text.retract(event["to_offset"])
            case "commit":
                text.commit(event["to_offset"], event["text"])
    return text.committed


def start_cli(
    *arguments: str, encoding: str = "utf-8", **variables: str
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("specrag")), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.defpath, "PYTHONIOENCODING": encoding, **variables},
    )


def close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def test_every_sampling_flag_reaches_the_request(
    specrag: Specrag, orchestrator: str, rag_script: RagScript
) -> None:
    arguments = ask("--endpoint", orchestrator, "--min-p", "0.25", "--repetition-penalty", "1.5")
    arguments += ["--presence-penalty", "-0.5", "--frequency-penalty", "0.75"]
    arguments += ["--logit-bias", "7=-100", "--logit-bias", "12=0.5"]
    arguments += ["--min-tokens", "3", "--logprobs", "0"]
    assert specrag(*arguments, "--json").code == 0
    assert rag_script.requests[0].sampling == common_pb2.SamplingParams(
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={7: -100.0, 12: 0.5},
        min_tokens=3,
        num_top_logprobs=0,
    )


def logprobs_event(seq: int, first_token: int, *token_ids: int) -> rag_pb2.AnswerEvent:
    return rag_pb2.AnswerEvent(
        seq=seq,
        token_logprobs=rag_pb2.TokenLogprobs(
            first_token=first_token,
            tokens=[
                rag_pb2.TokenLogprob(
                    token_id=token_id,
                    text=f"<{token_id}>",
                    logprob=-0.25,
                    top=[rag_pb2.TopLogprob(token_id=1, text="<1>", logprob=-0.125)],
                )
                for token_id in token_ids
            ],
        ),
    )


@pytest.mark.parametrize("shape", ["--json", "--events"])
def test_log_probs_are_shown_one_a_token_of_the_answer(
    specrag: Specrag,
    orchestrator: str,
    rag_script: RagScript,
    make_finished: Callable[..., rag_pb2.AnswerEvent],
    shape: str,
) -> None:
    rag_script.events[1:] = [
        logprobs_event(2, 0, 5, 6),
        rag_pb2.AnswerEvent(seq=3, commit=rag_pb2.Commit(to_offset=2, text="ab")),
        logprobs_event(4, 2, 7),
        make_finished(5, "ab"),
    ]
    outcome = specrag(*ask("--endpoint", orchestrator, "--logprobs", "1", shape))
    assert outcome.code == 0
    if shape == "--json":
        shown = json.loads(outcome.out)["logprobs"]
    else:
        lines = [json.loads(line) for line in outcome.out.splitlines()]
        of_kind = [one for one in lines if one["type"] == "token_logprobs"]
        assert [one["first_token"] for one in of_kind] == [0, 2]
        shown = [token for one in of_kind for token in one["tokens"]]
    assert [one["token_id"] for one in shown] == [5, 6, 7]
    assert shown[0] == {
        "token_id": 5,
        "text": "<5>",
        "logprob": -0.25,
        "top": [{"token_id": 1, "text": "<1>", "logprob": -0.125}],
    }


@pytest.mark.parametrize(
    ("first_token", "token_ids", "text"),
    [(1, (5, 6, 7), "log-probabilities of token 1"), (0, (5, 6), "other tokens than")],
)
def test_log_probs_of_other_tokens_than_the_answers_are_refused(
    specrag: Specrag,
    orchestrator: str,
    rag_script: RagScript,
    make_finished: Callable[..., rag_pb2.AnswerEvent],
    first_token: int,
    token_ids: tuple[int, ...],
    text: str,
) -> None:
    rag_script.events[1:] = [logprobs_event(2, first_token, *token_ids), make_finished(3, "")]
    outcome = specrag(*ask("--endpoint", orchestrator, "--logprobs", "1", "--json"))
    assert outcome.code == 3
    assert text in outcome.err
