"""The transcript: events replay to the detokenized ids, cut at the stop, whatever the chunking."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specrag_common.text.detokenizer import IncrementalDetokenizer
from specrag_common.text.stops import StopMatcher
from specrag_orchestrator.answering.transcript import (
    Commit,
    Retract,
    Speculative,
    TextEvent,
    Transcript,
    TranscriptError,
)

from tests.orchestrator.byte_tokenizer import END_ID, TOKENIZER, StrictReplay, encode


def make(*stops: str, min_tokens: int = 0, show_speculation: bool = True) -> Transcript:
    return Transcript(
        IncrementalDetokenizer(TOKENIZER),
        stops,
        min_tokens=min_tokens,
        show_speculation=show_speculation,
    )


def test_commit_of_plain_text_is_one_event() -> None:
    assert make().commit(encode("Hello")) == [Commit(to_offset=5, text="Hello")]


def test_speculation_is_appended_behind_what_is_shown() -> None:
    transcript = make()
    assert transcript.speculate(encode("ab")) == [Speculative(offset=0, text="ab")]
    assert transcript.speculate(encode("abcd")) == [Speculative(offset=2, text="cd")]


def test_commit_that_equals_shown_text_leaves_the_rest_shown() -> None:
    transcript = make()
    transcript.speculate(encode("abcdef"))
    assert transcript.commit(encode("abc")) == [Commit(to_offset=3, text="abc")]
    assert transcript.speculate(encode("def")) == []


def test_commit_that_differs_is_preceded_by_the_retraction_of_the_wrong_part() -> None:
    transcript = make()
    transcript.speculate(encode("abcdef"))
    assert transcript.commit(encode("abX")) == [
        Retract(to_offset=2),
        Commit(to_offset=3, text="abX"),
    ]
    assert transcript.num_retracted_chars == 4


def test_commit_beyond_shown_text_confirms_it_first_and_retracts_nothing() -> None:
    transcript = make()
    transcript.speculate(encode("ab"))
    assert transcript.commit(encode("abcd")) == [
        Commit(to_offset=2, text="ab"),
        Commit(to_offset=4, text="cd"),
    ]


def test_other_speculation_retracts_only_what_differs() -> None:
    transcript = make()
    transcript.commit(encode("x"))
    transcript.speculate(encode("abcd"))
    assert transcript.speculate(encode("abZ")) == [
        Retract(to_offset=3),
        Speculative(offset=3, text="Z"),
    ]


def test_shorter_speculation_that_agrees_leaves_the_longer_one_shown() -> None:
    transcript = make()
    transcript.speculate(encode("abcd"))
    assert transcript.speculate(encode("ab")) == []


def test_unfinished_code_point_is_held_back_until_decided() -> None:
    transcript = make()
    first, *rest = encode("京")
    assert transcript.commit([*encode("a"), first]) == [Commit(to_offset=1, text="a")]
    assert transcript.commit(rest) == [Commit(to_offset=2, text="京")]


def test_rejection_in_mid_code_point_retracts_whole_characters() -> None:
    transcript = make()
    emoji, other = encode("😀"), encode("😎")
    transcript.speculate([*encode("a"), *emoji])
    assert transcript.commit([*encode("a"), *other[:3]]) == [Commit(to_offset=1, text="a")]
    assert transcript.commit(other[3:]) == [Retract(to_offset=1), Commit(to_offset=2, text="😎")]


def test_what_could_begin_a_stop_string_is_held_back() -> None:
    transcript = make("\n\nQ:")
    assert transcript.commit(encode("Yes.\n\n")) == [Commit(to_offset=4, text="Yes.")]
    assert transcript.commit(encode("No.")) == [Commit(to_offset=9, text="\n\nNo.")]


def test_speculation_that_held_back_text_contradicts_is_retracted_at_once() -> None:
    transcript = make("STOP")
    transcript.speculate(encode("abc"))
    assert transcript.commit(encode("aST")) == [
        Commit(to_offset=1, text="a"),
        Retract(to_offset=1),
    ]


def test_stop_string_across_commits_ends_the_text_before_it() -> None:
    transcript = make("STOP")
    transcript.commit(encode("abST"))
    assert transcript.finish_with(encode("OPxyz"), stop_text_length=2) == []
    assert transcript.text == "ab"


def test_stop_string_inside_a_batch_is_not_shown() -> None:
    transcript = make("STOP")
    events = transcript.finish_with(encode("abSTOPcd"), stop_text_length=2)
    assert events == [Commit(to_offset=2, text="ab")]


def test_stop_string_in_speculation_is_not_shown() -> None:
    assert make("STOP").speculate(encode("abSTOPcd")) == [Speculative(offset=0, text="ab")]


def test_stop_string_among_the_first_tokens_holds_nothing_back() -> None:
    transcript = make("STOP", min_tokens=6)
    assert transcript.commit(encode("aSTO")) == [Commit(to_offset=4, text="aSTO")]
    assert transcript.commit(encode("Pb")) == [Commit(to_offset=6, text="Pb")]
    assert transcript.commit(encode("cST")) == [Commit(to_offset=7, text="c")]


def test_stop_string_that_begins_among_the_first_tokens_does_not_count() -> None:
    transcript = make("STOP", min_tokens=3)
    assert transcript.commit(encode("aSTOPb")) == [Commit(to_offset=6, text="aSTOPb")]


def test_stop_string_among_the_first_tokens_is_shown_in_speculation() -> None:
    transcript = make("STOP", min_tokens=6)
    shown = [Speculative(offset=0, text="aSTOPb")]
    assert transcript.speculate(encode("aSTOPbSTOPc")) == shown


def test_finish_takes_back_what_stays_speculative() -> None:
    transcript = make()
    transcript.speculate(encode("abcd"))
    assert transcript.finish_with([*encode("ab"), END_ID]) == [
        Commit(to_offset=2, text="ab"),
        Retract(to_offset=2),
    ]


def test_finish_commits_text_held_back_for_a_stop_that_never_came() -> None:
    transcript = make("STOP")
    transcript.commit(encode("abST"))
    assert transcript.finish() == [Commit(to_offset=4, text="ST")]


def test_finish_in_mid_code_point_shows_a_replacement_character() -> None:
    transcript = make()
    assert transcript.finish_with(encode("京")[:2]) == [Commit(to_offset=1, text="\ufffd")]


def test_stop_inside_committed_text_is_refused() -> None:
    transcript = make()
    transcript.commit(encode("abc"))
    with pytest.raises(TranscriptError, match="stop_text_length=1"):
        transcript.finish(stop_text_length=1)


def test_without_speculation_only_commits_are_emitted() -> None:
    transcript = make(show_speculation=False)
    assert transcript.speculate(encode("abc")) == []
    assert transcript.commit(encode("xyz")) == [Commit(to_offset=3, text="xyz")]


@dataclass(frozen=True)
class Script:
    """An answer's ids, cut into rounds, each with the speculation shown before it."""

    token_ids: list[int]
    stops: list[str]
    min_tokens: int
    rounds: list[tuple[int, list[list[int]]]]


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    alphabet = "ab .\n京東한글é😀👩‍🇩\ufffd"
    text = draw(st.text(alphabet, min_size=1, max_size=30))
    token_ids = encode(text)
    if draw(st.booleans()):
        token_ids.insert(draw(st.integers(0, len(token_ids))), 0xE4)  # a byte out of place
    stops = draw(st.lists(st.text(alphabet, min_size=1, max_size=4), max_size=2))
    if draw(st.booleans()):
        begin = draw(st.integers(0, len(text) - 1))
        stops.append(text[begin : begin + draw(st.integers(1, 4))])
    rounds = []
    done = 0
    while done < len(token_ids):
        size = draw(st.integers(1, 7))
        rounds.append((size, [draw_speculation(draw, token_ids[done:]) for _ in range(2)]))
        done += size
    return Script(token_ids, stops, draw(st.sampled_from([0, 0, 1, 5, 12])), rounds)


def draw_speculation(draw: st.DrawFn, coming: list[int]) -> list[int]:
    """Return what is coming, cut and with a wrong tail, as drafts are."""
    right = coming[: draw(st.integers(0, 9))]
    return right + draw(st.lists(st.integers(0, 255), max_size=4))


def cut_at_stop(script: Script) -> tuple[list[int], int | None]:
    """Judge token by token, as the target does: ids up to the one that completes a stop."""
    detokenizer, matcher, text = IncrementalDetokenizer(TOKENIZER), StopMatcher(script.stops), ""
    token_ids, num_early_chars = script.token_ids, 0
    for idx, token_id in enumerate(token_ids):
        text += detokenizer.push([token_id])
        if idx < script.min_tokens:
            num_early_chars = len(text)
        match = matcher.find(text, search_from=num_early_chars)
        if match is not None:
            return token_ids[: idx + 1], match.start
    return token_ids, None


@settings(max_examples=400, deadline=None)
@given(script=scripts(), show_speculation=st.booleans())
def test_events_replay_to_the_ids_cut_at_the_stop(script: Script, show_speculation: bool) -> None:
    token_ids, stop_text_length = cut_at_stop(script)
    whole: str = TOKENIZER.decode(token_ids)
    expected = whole if stop_text_length is None else whole[:stop_text_length]
    transcript = make(
        *script.stops, min_tokens=script.min_tokens, show_speculation=show_speculation
    )
    replay = StrictReplay()
    for batch, speculations, is_last in cut_into_rounds(token_ids, script):
        for speculation in speculations:
            replay.apply_all(transcript.speculate(speculation))
        events: list[TextEvent] = (
            transcript.finish_with(batch, stop_text_length) if is_last else transcript.commit(batch)
        )
        replay.apply_all(events)
        assert expected.startswith(replay.committed), "committed text is final"
        assert transcript.text == replay.committed
    assert replay.committed == expected
    assert replay.speculative == ""
    assert transcript.num_retracted_chars == replay.num_retracted


def cut_into_rounds(
    token_ids: list[int], script: Script
) -> list[tuple[list[int], list[list[int]], bool]]:
    cut = []
    done = 0
    for size, speculations in script.rounds:
        if done >= len(token_ids):
            break
        batch = token_ids[done : done + size]
        done += size
        cut.append((batch, speculations, done >= len(token_ids)))
    return cut
