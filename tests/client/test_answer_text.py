"""Replaying events into text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_client import AnswerText, Commit, ReplayError, Retract, RetrievalDone, Speculative


def test_append_shows_speculative_text_after_committed_text() -> None:
    text = AnswerText()
    text.commit(3, "The")
    text.append(3, " cat")
    assert (text.committed, text.speculative, text.text) == ("The", " cat", "The cat")


def test_commit_confirms_equal_text_and_leaves_the_rest_speculative() -> None:
    text = AnswerText()
    text.append(0, "The cat sat")
    text.commit(7, "The cat")
    assert (text.committed, text.speculative) == ("The cat", " sat")


def test_commit_that_goes_on_beyond_the_speculation_is_taken() -> None:
    text = AnswerText()
    text.append(0, "The")
    text.commit(7, "The cat")
    assert (text.committed, text.speculative) == ("The cat", "")


def test_retract_then_commit_replaces_the_text() -> None:
    text = AnswerText()
    text.append(0, "The dog")
    text.retract(4)
    text.commit(7, "The cat")
    assert text.text == "The cat"


def test_offsets_count_code_points_not_bytes_or_utf16_units() -> None:
    text = AnswerText()
    text.append(0, "猫🐈")
    text.append(2, "が")
    text.retract(2)
    text.commit(2, "猫🐈")
    assert text.committed == "猫🐈"
    assert len(text) == 2


@pytest.mark.parametrize("offset", [0, 2, 4])
def test_append_is_refused_away_from_the_end(offset: int) -> None:
    text = AnswerText()
    text.append(0, "abc")
    with pytest.raises(ReplayError, match=f"offset={offset}, but the text ends at 3"):
        text.append(offset, "x")


@pytest.mark.parametrize("to_offset", [0, 2, 6])
def test_retract_is_refused_in_committed_text_and_beyond_the_end(to_offset: int) -> None:
    text = AnswerText()
    text.commit(3, "abc")
    text.append(3, "de")
    with pytest.raises(ReplayError, match=f"to_offset={to_offset}"):
        text.retract(to_offset)


def test_commit_is_refused_when_shown_text_differs() -> None:
    text = AnswerText()
    text.append(0, "The dog")
    with pytest.raises(ReplayError, match="not retracted"):
        text.commit(7, "The cat")


def test_commit_is_refused_when_its_length_leaves_a_gap() -> None:
    text = AnswerText()
    text.commit(1, "a")
    with pytest.raises(ReplayError, match="last commit ended at 1"):
        text.commit(4, "cd")


def test_apply_ignores_events_without_text() -> None:
    text = AnswerText()
    event = RetrievalDone(
        seq=1, passages=(), num_dropped_passages=0, num_dropped_turns=0, answer_id="a", trace_id="t"
    )
    assert not text.apply(event)
    assert text.apply(Commit(seq=2, to_offset=2, text="ok"))
    assert text.text == "ok"


@given(st.text(min_size=1, max_size=30), st.data())
def test_any_legal_stream_rebuilds_the_final_text(final: str, data: st.DataObject) -> None:
    """Guess, take back and commit at random places; what stands is always a prefix of the end."""
    text = AnswerText()
    seq = 0
    while len(text.committed) < len(final):
        guess = data.draw(st.text(max_size=8) | st.just(final[len(text) : len(text) + 5]))
        seq += 1
        text.apply(Speculative(seq=seq, offset=len(text), text=guess))
        committed = len(text.committed)
        end = data.draw(st.integers(committed + 1, len(final)))
        piece = final[committed:end]
        agreed = _common_prefix(text.speculative, piece)
        if agreed < min(len(text.speculative), len(piece)):
            text.apply(Retract(seq=seq, to_offset=committed + agreed))
        text.apply(Commit(seq=seq, to_offset=end, text=piece))
        assert text.committed == final[:end]
        assert text.text.startswith(text.committed)
    assert text.committed == final


def _common_prefix(one: str, other: str) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length
