"""Who is let in, who waits, who shares a prefill, who runs out of time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from specrag_inference.engine import MAX_JOBS, Engine, EngineConfig
from specrag_inference.messages import (
    EngineEvent,
    FreeSequence,
    SequenceFailed,
    SequenceOpened,
    TokensProposed,
)
from specrag_inference.testing import build_byte_tokenizer, build_random_model, drain

from tests.inference.engine.commands import (
    decode_command,
    draw_tokens,
    list_tokens,
    open_command,
    propose_command,
    score_chain_command,
)

BuildEngine = Callable[..., Engine]
GenerateReference = Callable[[tuple[int, ...], int], list[int]]


def list_opened(events: list[EngineEvent]) -> list[str]:
    return [event.sequence_id for event in events if isinstance(event, SequenceOpened)]


def list_failures(events: list[EngineEvent]) -> list[tuple[str, str]]:
    return [
        (event.sequence_id, event.code) for event in events if isinstance(event, SequenceFailed)
    ]


def test_full_queue_refuses_the_next_and_says_so(build_engine: BuildEngine) -> None:
    engine = build_engine(max_sequences=1, max_waiting=2)
    engine.submit(open_command("running", draw_tokens(0, 20)))
    drain(engine)
    for name in ("first", "second", "third"):
        engine.submit(open_command(name, draw_tokens(1, 20)))
    (refused,) = drain(engine)
    assert isinstance(refused, SequenceFailed)
    assert (refused.sequence_id, refused.code) == ("third", "OVERLOADED")
    assert "num_waiting=2 has reached max_waiting=2" in refused.message
    assert engine.stats().num_waiting == 2
    for name in ("running", "first"):
        engine.submit(FreeSequence(sequence_id=name))
    assert list_opened(drain(engine)) == ["second"]


def test_small_prompts_pass_a_huge_one_that_does_not_fit_but_not_for_ever(
    build_engine: BuildEngine,
) -> None:
    engine = build_engine(num_blocks=40)
    engine.submit(open_command("holder", draw_tokens(0, 160)))
    drain(engine)
    engine.submit(open_command("huge", draw_tokens(1, 500)))
    order: list[str] = []
    for number in range(20):
        engine.submit(open_command(f"small{number}", draw_tokens(2 + number, 20)))
        order += list_opened(drain(engine))
        if number % 2:
            engine.submit(FreeSequence(sequence_id=f"small{number - 1}"))
    assert order == [f"small{number}" for number in range(8)]
    for name in ("holder", *order):
        engine.submit(FreeSequence(sequence_id=name))
    assert "huge" in list_opened(drain(engine))


def test_equal_prompts_opened_together_are_prefilled_once(
    build_engine: BuildEngine, generate_reference: GenerateReference
) -> None:
    prompt = draw_tokens(3, 200)
    engine = build_engine()
    for name in ("a", "b", "c"):
        engine.submit(open_command(name, prompt))
    events = drain(engine)
    cached = {
        event.sequence_id: event.num_cached_tokens
        for event in events
        if isinstance(event, SequenceOpened)
    }
    assert cached == {"a": 0, "b": 192, "c": 192}
    assert sum(engine.stats().batches.num_tokens.values()) == 199 + 2 * 7
    assert engine.stats().num_prefix_hit_tokens == 2 * 192
    assert engine.stats().num_prefix_tokens == 3 * 199
    for name in ("a", "b", "c"):
        engine.submit(decode_command(name, 10))
    events = drain(engine)
    for name in ("a", "b", "c"):
        assert list_tokens(events, name) == generate_reference(prompt, 10)


@pytest.mark.parametrize("num_steps", range(6))
def test_follower_takes_up_what_a_cancelled_leader_has_left(
    build_engine: BuildEngine, generate_reference: GenerateReference, num_steps: int
) -> None:
    prompt = draw_tokens(4, 200)
    engine = build_engine()
    engine.submit(open_command("leader", prompt))
    engine.submit(open_command("follower", (*prompt, 1, 2)))
    events = [event for _ in range(num_steps) for event in engine.step()]
    engine.submit(FreeSequence(sequence_id="leader"))
    events += drain(engine)
    assert "follower" in list_opened(events)
    assert sum(engine.stats().batches.num_tokens.values()) < 220
    engine.submit(decode_command("follower", 10))
    assert list_tokens(drain(engine)) == generate_reference((*prompt, 1, 2), 10)


def test_prompts_of_different_scopes_do_not_wait_for_each_other(build_engine: BuildEngine) -> None:
    prompt = draw_tokens(5, 100)
    engine = build_engine()
    engine.submit(open_command("a", prompt, scope=b"one"))
    engine.submit(open_command("b", prompt, scope=b"two"))
    engine.step()
    assert engine.stats().num_running == 2
    cached = [e.num_cached_tokens for e in drain(engine) if isinstance(e, SequenceOpened)]
    assert cached == [0, 0]


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed_engine(clock: Clock) -> Engine:
    config = EngineConfig(
        num_blocks=64, max_step_tokens=32, max_shared_prefill_tokens=16, max_sequences=2
    )
    model = build_random_model("llama", seed=0)
    return Engine(model, build_byte_tokenizer(), config, clock=clock)


@pytest.mark.parametrize("state", ["prefilling", "idle", "decoding", "drafting", "scoring"])
def test_sequence_past_its_deadline_fails_whatever_it_is_doing(
    timed_engine: Engine, clock: Clock, state: str
) -> None:
    engine = timed_engine
    engine.submit(open_command("a", draw_tokens(0, 100), deadline_s=5.0))
    engine.submit(open_command("neighbour", draw_tokens(1, 20)))
    if state == "prefilling":
        engine.step()
    else:
        drain(engine)
    if state == "decoding":
        engine.submit(decode_command("a", 50))
    if state == "drafting":
        engine.submit(propose_command("a", gamma=8))
    if state == "scoring":
        engine.submit(score_chain_command("a", draw_tokens(2, 90)))
    engine.step()
    clock.now += 4.9
    assert list_failures(engine.step()) == []
    clock.now += 0.2
    assert engine.has_work
    assert list_failures(engine.step()) == [("a", "DEADLINE")]
    drain(engine)
    assert engine.stats().num_used_blocks == 2
    engine.check_integrity()


def test_waiting_sequence_past_its_deadline_fails_and_wakes_an_idle_engine(
    timed_engine: Engine, clock: Clock
) -> None:
    engine = timed_engine
    for name in ("a", "b"):
        engine.submit(open_command(name, draw_tokens(0, 20)))
    engine.submit(open_command("waiting", draw_tokens(1, 20), deadline_s=3.0))
    drain(engine)
    assert engine.stats().num_waiting == 1
    clock.now += 1.0
    assert not engine.has_work
    assert engine.seconds_to_deadline() == pytest.approx(2.0)
    assert engine.stats().oldest_wait_s == pytest.approx(1.0)
    clock.now += 2.0
    (failed,) = drain(engine)
    assert isinstance(failed, SequenceFailed)
    assert failed.code == "DEADLINE"
    assert "before it was admitted" in failed.message
    assert engine.seconds_to_deadline() is None
    assert engine.stats().num_waiting == 0


def test_deadline_of_a_freed_sequence_does_not_reach_the_next_of_its_name(
    timed_engine: Engine, clock: Clock
) -> None:
    engine = timed_engine
    engine.submit(open_command("a", draw_tokens(0, 20), deadline_s=1.0))
    drain(engine)
    engine.submit(FreeSequence(sequence_id="a"))
    engine.submit(open_command("a", draw_tokens(0, 20), deadline_s=9.0))
    drain(engine)
    clock.now += 2.0
    assert engine.step() == []
    clock.now += 8.0
    assert list_failures(engine.step()) == [("a", "DEADLINE")]


def test_freed_blocks_of_an_expired_sequence_let_the_next_one_in(
    timed_engine: Engine, clock: Clock
) -> None:
    engine = timed_engine
    for name in ("a", "b"):
        engine.submit(open_command(name, draw_tokens(0, 20), deadline_s=1.0))
    engine.submit(open_command("next", draw_tokens(1, 20)))
    drain(engine)
    clock.now += 1.0
    events = drain(engine)
    assert sorted(list_failures(events)) == [("a", "DEADLINE"), ("b", "DEADLINE")]
    assert list_opened(events) == ["next"]


def test_second_opening_under_one_name_gives_up_both_and_leaks_nothing(
    build_engine: BuildEngine,
) -> None:
    engine = build_engine()
    engine.submit(open_command("other", draw_tokens(1, 20)))
    engine.submit(open_command("a", draw_tokens(0, 40)))
    drain(engine)
    held = engine.stats().num_used_blocks
    engine.submit(open_command("a", draw_tokens(0, 40)))
    (failed,) = drain(engine)
    assert isinstance(failed, SequenceFailed)
    assert (failed.sequence_id, failed.code) == ("a", "INVALID")
    assert "open already" in failed.message
    assert engine.stats().num_used_blocks == held - 3


def test_commands_beyond_the_queue_of_a_sequence_fail_it_as_overloaded(
    build_engine: BuildEngine,
) -> None:
    engine = build_engine()
    engine.submit(open_command("a", draw_tokens(0, 20)))
    engine.submit(open_command("b", draw_tokens(1, 20)))
    drain(engine)
    for _ in range(MAX_JOBS + 1):
        engine.submit(decode_command("a", 2))
    engine.submit(propose_command("b", gamma=2))
    events = drain(engine)
    assert list_failures(events) == [("a", "OVERLOADED")]
    assert any(isinstance(event, TokensProposed) for event in events)


def test_what_is_no_command_is_refused_and_changes_nothing(
    build_engine: BuildEngine,
) -> None:
    engine = build_engine()
    engine.submit(open_command("a", draw_tokens(0, 20)))
    with pytest.raises(TypeError, match="'nonsense' is no engine command"):
        engine.submit("nonsense")  # type: ignore[arg-type]
    assert list_opened(drain(engine)) == ["a"]
