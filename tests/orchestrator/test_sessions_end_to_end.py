"""Conversations: history, numbering, saving, replaying, leases; over a real Valkey."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from specrag.v1 import common_pb2, rag_pb2
from specrag_common.runtime.errors import (
    Cancelled,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    SessionBusy,
    SpecragError,
    TurnNotSaved,
    UpstreamUnavailable,
)

from tests.common.sessions.valkey import find_free_port, running_valkey
from tests.orchestrator.mesh import Mesh, make_passage, make_passages, running_mesh
from tests.orchestrator.scripted_target import DraftScript, TargetScript, decode_ids, script_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

TARGET_ONLY = rag_pb2.ANSWER_POLICY_TARGET_ONLY
FIRST = "Ada approves travel [1]. Bob pays."
SECOND = "Ada does."


async def get_turns(mesh: Mesh, session_id: str = "s1") -> list[rag_pb2.SessionTurn]:
    response = await mesh.stub.GetSession(rag_pb2.GetSessionRequest(session_id=session_id))
    return list(response.turns)


async def read_rest(call: Any) -> tuple[str, SpecragError | None]:
    """Return the committed text still to come and the error the stream ends with."""
    text = ""
    try:
        async for response in call:
            assert not response.event.HasField("finished")
            text += response.event.commit.text
    except SpecragError as exc:
        return text, exc
    return text, None


async def ask_until_free(mesh: Mesh) -> None:
    """Ask in session s1 until its lease is free."""
    async with asyncio.timeout(2):
        while (await mesh.ask(session_id="s1")).error is not None:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


def set_answer(mesh: Mesh, text: str) -> None:
    mesh.verifier.script.token_ids = script_of(text)
    for drafter in mesh.drafters:
        drafter.script.token_ids = script_of(text)


async def test_second_turn_sees_the_first_behind_an_unchanged_beginning(redis_url: str) -> None:
    drafts = [DraftScript([]), DraftScript([])]
    async with running_mesh(TargetScript([]), drafts, redis_url=redis_url) as mesh:
        mesh.retriever.passages = [
            make_passage("c1", "Ada approves travel."),
            make_passage("c2", "Bob pays for travel."),
            make_passage("c3", "Cleo is on leave."),
        ]
        set_answer(mesh, FIRST)
        first = await mesh.ask(question="Travel?", collection="handbook", session_id="s1")
        assert [one.number for one in first.retrieval.passages] == [1, 2, 3]
        mesh.retriever.passages = [
            make_passage("c4", "Dan is new."),
            make_passage("c2", "Bob pays for travel."),
        ]
        set_answer(mesh, SECOND)
        second = await mesh.ask(question="And who?", collection="handbook", session_id="s1")
        assert second.text == SECOND
        before, after = (list(one.prompt.turns) for one in mesh.verifier.opened)
        assert len(after) == 2
        assert after[0].passages == before[0].passages
        assert after[0].question == before[0].question == "Travel?"
        assert after[0].answer == FIRST
        assert decode_ids(after[0].answer_token_ids[0].token_ids) == script_of(FIRST)
        assert [(one.number, one.text) for one in after[1].passages] == [(4, "Dan is new.")]
        assert [one.number for one in second.retrieval.passages] == [4, 2, 1, 3]
        assert mesh.retriever.queries[1] == "Travel?\nAnd who?"


async def test_each_drafter_keeps_its_passages_over_the_turns(redis_url: str) -> None:
    drafts = [DraftScript([]), DraftScript([])]
    async with running_mesh(TargetScript([]), drafts, redis_url=redis_url) as mesh:
        for count, text in ((3, FIRST), (6, SECOND)):
            mesh.retriever.passages = make_passages(count)
            set_answer(mesh, text)
            assert (await mesh.ask(collection="handbook", session_id="s1")).error is None
        for drafter, numbers in zip(mesh.drafters, ([[1, 3], [5]], [[2], [4, 6]]), strict=True):
            last = drafter.opened[-1].prompt
            assert [[one.number for one in turn.passages] for turn in last.turns] == numbers


async def test_stored_turn_carries_answer_and_citations(redis_url: str) -> None:
    async with running_mesh(TargetScript(script_of(FIRST)), redis_url=redis_url) as mesh:
        mesh.retriever.passages = [make_passage("c1", "Ada approves travel.", start_char=50)]
        answered = await mesh.ask(collection="handbook", session_id="s1", request_id="r1")
        (turn,) = await get_turns(mesh)
        assert (turn.answer, turn.partial, turn.request_id) == (FIRST, False, "r1")
        assert turn.finish_reason == common_pb2.FINISH_REASON_STOP
        assert list(turn.citations) == answered.of_kind("citation")
        (citation,) = turn.citations
        assert (citation.start, citation.end) == (0, FIRST.index("Bob") - 1)
        assert (citation.source_start, citation.source_end) == (50, 70)


async def test_next_turn_at_the_instant_of_the_end_loses_nothing(redis_url: str) -> None:
    async with running_mesh(
        TargetScript(script_of("Yes.")), redis_url=redis_url, max_concurrent_answers=1
    ) as mesh:
        calls = []
        for number in range(100):
            call = mesh.open(question=f"q{number}", session_id="s1", policy=TARGET_ONLY)
            calls.append(call)
            while not (await call.read()).event.HasField("finished"):
                pass
        request = rag_pb2.GetSessionRequest(session_id="s1", page_size=100)
        turns = (await mesh.stub.GetSession(request)).turns
        assert [turn.question for turn in turns] == [f"q{number}" for number in range(100)]


async def test_second_turn_at_the_same_time_is_aborted_with_a_retry_hint(redis_url: str) -> None:
    target = TargetScript(script_of("Yes."), prefill_s=0.3)
    async with running_mesh(target, redis_url=redis_url) as mesh:
        answers = await asyncio.gather(*(mesh.ask(session_id="s1") for _ in range(2)))
        (error,) = (one.error for one in answers if one.error is not None)
        assert isinstance(error, SessionBusy)
        assert error.retry_delay_s
        assert len(await get_turns(mesh)) == 1


async def test_repeat_of_a_request_replays_the_turn_and_adds_none(redis_url: str) -> None:
    async with running_mesh(TargetScript(script_of(FIRST)), redis_url=redis_url) as mesh:
        mesh.retriever.passages = [make_passage("c1", "Ada approves travel.")]
        fields: dict[str, Any] = {"collection": "handbook", "session_id": "s1", "request_id": "r1"}
        first = await mesh.ask(**fields, seed=7)
        set_answer(mesh, SECOND)
        again = await mesh.ask(**fields, seed=7)
        assert again.text == first.text == FIRST
        assert again.retrieval.passages == first.retrieval.passages
        assert again.of_kind("citation") == first.of_kind("citation")
        for name in ("answer", "token_ids", "random_key", "mode", "usage", "finish_reason"):
            assert getattr(again.finished, name) == getattr(first.finished, name)
        assert len(await get_turns(mesh)) == 1
        assert len(mesh.verifier.opened) == 1


async def test_request_id_of_another_question_is_refused_and_replays_nothing(
    redis_url: str,
) -> None:
    async with running_mesh(TargetScript(script_of(FIRST)), redis_url=redis_url) as mesh:
        fields: dict[str, Any] = {"collection": "handbook", "session_id": "s1", "request_id": "r1"}
        assert (await mesh.ask(question="Who?", **fields)).error is None
        other = await mesh.ask(question="When?", **fields)
        assert isinstance(other.error, InvalidRequest)
        assert "request_id" in str(other.error)
        assert other.replay.committed == ""
        assert len(await get_turns(mesh)) == 1


@pytest.mark.parametrize("policy", [rag_pb2.ANSWER_POLICY_JOINT, TARGET_ONLY])
async def test_cancelled_turn_keeps_question_and_committed_text_marked(
    redis_url: str, policy: rag_pb2.AnswerPolicy.ValueType
) -> None:
    target = TargetScript(script_of(FIRST), step_s=0.02)
    async with running_mesh(target, redis_url=redis_url) as mesh:
        call = mesh.open(question="Who?", session_id="s1", policy=policy, request_id="r1")
        answer_id = (await call.read()).event.retrieval_done.answer_id
        text = "".join([(await call.read()).event.commit.text for _ in range(5)])
        await mesh.stub.CancelAnswer(rag_pb2.CancelAnswerRequest(answer_id=answer_id))
        rest, error = await read_rest(call)
        text += rest
        assert isinstance(error, Cancelled)
        (turn,) = await get_turns(mesh)
        assert (turn.question, turn.answer, turn.partial) == ("Who?", text, True)
        again = await mesh.ask(question="Who?", session_id="s1", request_id="r1")
        assert again.replay.committed == text
        assert isinstance(again.error, Cancelled)
        target.step_s = 0.0
        assert (await mesh.ask(question="And?", session_id="s1")).error is None
        assert mesh.verifier.opened[-1].prompt.turns[0].answer == text


async def test_turn_of_a_client_that_left_holds_only_what_it_was_sent(redis_url: str) -> None:
    target = TargetScript(script_of(FIRST), step_s=0.02)
    async with running_mesh(target, redis_url=redis_url) as mesh:
        call = mesh.open(session_id="s1")
        await call.read()
        text = "".join([(await call.read()).event.commit.text for _ in range(5)])
        call.cancel()
        await mesh.wait_idle()
        await ask_until_free(mesh)
        turn = (await get_turns(mesh))[0]
        assert turn.partial
        assert turn.answer.startswith(text)
        assert len(turn.answer) < len(text) + 4


async def test_failure_before_any_text_saves_nothing_and_may_be_tried_again(
    redis_url: str,
) -> None:
    async with running_mesh(TargetScript(script_of(FIRST)), redis_url=redis_url) as mesh:
        mesh.retriever.error = UpstreamUnavailable("no store")
        fields: dict[str, Any] = {"collection": "handbook", "session_id": "s1", "request_id": "r1"}
        assert isinstance((await mesh.ask(**fields)).error, UpstreamUnavailable)
        mesh.retriever.error = None
        assert (await mesh.ask(**fields)).finished.answer == FIRST
        assert len(await get_turns(mesh)) == 1


async def test_failure_in_mid_answer_keeps_what_stands(redis_url: str) -> None:
    target = TargetScript(script_of(FIRST), error_at_round=2, error=UpstreamUnavailable("gone"))
    drafts = [DraftScript(script_of(FIRST), wrong_every=5)]
    async with running_mesh(target, drafts, redis_url=redis_url) as mesh:
        answered = await mesh.ask(session_id="s1")
        assert isinstance(answered.error, UpstreamUnavailable)
        (turn,) = await get_turns(mesh)
        assert turn.partial
        assert turn.answer == answered.replay.committed != ""


async def test_lost_store_refuses_sessions_and_serves_the_rest(tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{find_free_port()}/0"
    async with running_mesh(TargetScript(script_of("Yes.")), redis_url=url) as mesh:
        answered = await mesh.ask(session_id="s1")
        assert isinstance(answered.error, UpstreamUnavailable)
        assert (await mesh.ask()).finished.answer == "Yes."


async def test_turn_that_cannot_be_saved_ends_the_stream_unavailable(tmp_path: Path) -> None:
    port = find_free_port()
    target = TargetScript(script_of("Yes, indeed."), step_s=0.05)
    async with running_mesh(target, redis_url=f"redis://127.0.0.1:{port}/0") as mesh:
        with running_valkey(tmp_path, port=port):
            call = mesh.open(session_id="s1")
            await call.read()
        text, error = await read_rest(call)
        assert isinstance(error, TurnNotSaved)
        assert text == "Yes, indeed."


async def test_without_a_store_a_session_is_a_failed_precondition() -> None:
    async with running_mesh(TargetScript(script_of("Yes."))) as mesh:
        assert isinstance((await mesh.ask(session_id="s1")).error, FailedPrecondition)
        with pytest.raises(FailedPrecondition):
            await mesh.stub.ListSessions(rag_pb2.ListSessionsRequest())


async def test_interleaved_sessions_never_see_each_other(redis_url: str) -> None:
    async with running_mesh(TargetScript(script_of("Noted.")), redis_url=redis_url) as mesh:

        async def talk(number: int) -> None:
            for turn in range(3):
                answered = await mesh.ask(
                    question=f"secret-{number}-{turn}",
                    session_id=f"s{number}",
                    tenant=f"t{number % 2}",
                )
                assert answered.error is None

        await asyncio.gather(*(talk(number) for number in range(20)))
        for opened in mesh.verifier.opened:
            owners = {turn.question.split("-")[1] for turn in opened.prompt.turns}
            assert len(owners) == 1
        lengths = sorted(len(one.prompt.turns) for one in mesh.verifier.opened)
        assert lengths == [1] * 20 + [2] * 20 + [3] * 20


async def test_turns_dropped_by_the_context_stay_out_and_their_passages_come_again(
    redis_url: str,
) -> None:
    async with running_mesh(TargetScript(script_of("Yes.")), redis_url=redis_url) as mesh:
        mesh.retriever.passages = make_passages(2)
        for _ in range(2):
            await mesh.ask(collection="handbook", session_id="s1")
        mesh.verifier.script.max_turns = 1
        third = await mesh.ask(collection="handbook", session_id="s1")
        assert third.retrieval.num_dropped_turns == 1
        assert [one.number for one in third.retrieval.passages] == [1, 2]
        turns = mesh.verifier.opened[-1].prompt.turns
        assert [[one.number for one in turn.passages] for turn in turns] == [[], [1, 2]]
        fourth = await mesh.ask(collection="handbook", session_id="s1")
        assert fourth.retrieval.num_dropped_turns == 2
        assert [one.number for one in fourth.retrieval.passages] == [1, 2]


async def test_passages_that_do_not_fit_are_neither_announced_nor_cited_nor_kept(
    redis_url: str,
) -> None:
    target = TargetScript(script_of("One [1]. Three [3]."), max_passages=2)
    async with running_mesh(target, redis_url=redis_url) as mesh:
        mesh.retriever.passages = make_passages(4)
        answered = await mesh.ask(collection="handbook", session_id="s1")
        assert [one.number for one in answered.retrieval.passages] == [1, 2]
        assert answered.retrieval.num_dropped_passages == 2
        assert {one.number for one in answered.of_kind("citation")} == {1}
        target.max_passages = 9
        await mesh.ask(collection="handbook", session_id="s1")
        past, last = mesh.verifier.opened[-1].prompt.turns
        assert [one.number for one in past.passages] == [1, 2]
        assert [one.number for one in last.passages] == [3, 4]


async def test_session_of_one_collection_refuses_another(redis_url: str) -> None:
    async with running_mesh(TargetScript(script_of("Yes.")), redis_url=redis_url) as mesh:
        await mesh.ask(session_id="s1")
        answered = await mesh.ask(session_id="s1", collection="handbook")
        assert isinstance(answered.error, FailedPrecondition)


async def test_sessions_are_listed_read_in_pages_and_deleted(redis_url: str) -> None:
    async with running_mesh(TargetScript(script_of("Yes.")), redis_url=redis_url) as mesh:
        for name in ("s1", "s2", "s2", "s2"):
            await mesh.ask(session_id=name)
        listed = await mesh.stub.ListSessions(rag_pb2.ListSessionsRequest())
        assert [(one.session_id, one.num_turns) for one in listed.sessions] == [
            ("s2", 3),
            ("s1", 1),
        ]
        page = await mesh.stub.GetSession(rag_pb2.GetSessionRequest(session_id="s2", page_size=2))
        assert (len(page.turns), page.next_page_token) == (2, "2")
        rest = await mesh.stub.GetSession(
            rag_pb2.GetSessionRequest(session_id="s2", page_size=2, page_token="2")
        )
        assert (len(rest.turns), rest.next_page_token) == (1, "")
        request = rag_pb2.DeleteSessionRequest(session_id="s2")
        assert (await mesh.stub.DeleteSession(request)).num_deleted_turns == 3
        with pytest.raises(NotFound):
            await get_turns(mesh, "s2")
        with pytest.raises(NotFound):
            await mesh.stub.GetSession(rag_pb2.GetSessionRequest(session_id="s1", tenant="other"))
