"""Where answers end, whatever the batches are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_inference.ends import AnswerEnds, EndDecision
from specrag_inference.messages import FinishReason, SamplingParams
from tokenizers import Tokenizer, decoders, models

PIECES = ["a", "b", "c", "ab", "bc", "abc", "xEN", "D.", "Ã¤", "Ãł", "Â"]
EOS = len(PIECES)


def build_tokenizer() -> Tokenizer:
    vocab = {piece: idx for idx, piece in enumerate([*PIECES, "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<eos>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


TOKENIZER = build_tokenizer()


def ids(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def watch(
    *, max_context_tokens: int | None = None, max_tokens: int = 100, **ends: object
) -> AnswerEnds:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset({EOS}), **ends)  # type: ignore[arg-type]
    return AnswerEnds(params, tokenizer=TOKENIZER, max_context_tokens=max_context_tokens)


def test_no_end_keeps_the_whole_batch() -> None:
    assert watch().advance(ids("a", "b")) == EndDecision(num_kept=2)
    assert watch().advance([]) == EndDecision(num_kept=0)


def test_stop_token_is_kept_and_nothing_behind_it() -> None:
    decision = watch().advance([*ids("a"), EOS, *ids("b")])
    assert decision == EndDecision(num_kept=2, finish_reason=FinishReason.STOP_TOKEN)


def test_stop_string_across_tokens_and_batches_keeps_the_token_and_cuts_the_text() -> None:
    ends = watch(stop=("END",))
    assert ends.advance(ids("ab", "xEN")) == EndDecision(num_kept=2)
    assert ends.advance(ids("D.", "a")) == EndDecision(
        num_kept=1, finish_reason=FinishReason.STOP_STRING, stop_text_length=3
    )


def test_earlier_stop_beats_a_later_cap() -> None:
    decision = watch(stop=("c",), max_tokens=5).advance(ids("a", "a", "bc", "a", "a", "a"))
    assert decision == EndDecision(
        num_kept=3, finish_reason=FinishReason.STOP_STRING, stop_text_length=3
    )


def test_stop_at_the_cap_is_reported_as_the_stop() -> None:
    assert watch(stop=("c",), max_tokens=1).advance(ids("c")).finish_reason is (
        FinishReason.STOP_STRING
    )
    assert watch(max_tokens=1).advance([EOS]).finish_reason is FinishReason.STOP_TOKEN


def test_cap_ends_inside_a_batch() -> None:
    decision = watch(max_tokens=3).advance(ids("a", "a", "a", "c"))
    assert decision == EndDecision(num_kept=3, finish_reason=FinishReason.LENGTH)


def test_full_context_is_told_from_the_cap() -> None:
    decision = watch(max_context_tokens=2, max_tokens=3).advance(ids("a", "a", "a"))
    assert decision == EndDecision(num_kept=2, finish_reason=FinishReason.CONTEXT)
    both = watch(max_context_tokens=2, max_tokens=2).advance(ids("a", "a"))
    assert both.finish_reason is FinishReason.LENGTH


def test_text_length_counts_code_points_of_the_whole_answer() -> None:
    ends = watch(stop=("c",))
    ends.advance(ids("Ã¤", "Ãł", "a"))
    assert ends.advance(ids("bc")).stop_text_length == 4


def test_stop_string_with_an_unfinished_code_point_before_it() -> None:
    decision = watch(stop=("b",)).advance(ids("a", "Â", "b"))
    assert decision.stop_text_length == 2


def test_stop_token_as_text_is_not_searched() -> None:
    assert watch(stop=("eos",)).advance([EOS]).finish_reason is FinishReason.STOP_TOKEN


def test_tokens_behind_the_end_are_refused() -> None:
    ends = watch()
    ends.advance([EOS])
    with pytest.raises(ValueError, match="ended after 1 tokens"):
        ends.advance(ids("a"))


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        AnswerEnds(SamplingParams(stop=("x",)))
    assert AnswerEnds(SamplingParams()).advance([1]).num_kept == 1


def test_stop_string_counts_only_behind_the_first_tokens() -> None:
    ends = watch(stop=("b",), min_tokens=2)
    assert ends.advance(ids("ab", "b", "a", "ab", "c")) == EndDecision(
        num_kept=4, finish_reason=FinishReason.STOP_STRING, stop_text_length=5
    )


def test_stop_string_that_begins_among_the_first_tokens_does_not_count() -> None:
    ends = watch(stop=("END",), min_tokens=2)
    assert ends.advance(ids("a", "xEN", "D.")) == EndDecision(num_kept=3)
    assert ends.advance(ids("xEN", "D.")).stop_text_length == 7


def test_length_and_context_end_an_answer_of_any_length() -> None:
    assert watch(max_tokens=2, min_tokens=2).advance(ids("a", "a")).finish_reason is (
        FinishReason.LENGTH
    )
    assert watch(max_context_tokens=1, min_tokens=5).advance(ids("a")).finish_reason is (
        FinishReason.CONTEXT
    )


@given(
    token_ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=25),
    stops=st.lists(st.text(alphabet="abcx.", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(0, 6), max_size=25),
    max_tokens=st.integers(1, 25),
    min_tokens=st.integers(0, 8),
)
def test_end_is_the_first_token_whose_text_holds_a_stop_whatever_the_batches(
    token_ids: list[int], stops: list[str], sizes: list[int], max_tokens: int, min_tokens: int
) -> None:
    expected = find_end(token_ids, stops, max_tokens, min_tokens)
    ends = watch(stop=tuple(stops), max_tokens=max_tokens, min_tokens=min_tokens)
    num_kept = 0
    decision = EndDecision(num_kept=0)
    for size in [*sizes, len(token_ids)]:
        decision = ends.advance(token_ids[num_kept : num_kept + size])
        num_kept += decision.num_kept
        if decision.finish_reason is not None:
            break
    assert (num_kept, decision.finish_reason, decision.stop_text_length) == expected


def find_end(
    token_ids: list[int], stops: list[str], max_tokens: int, min_tokens: int
) -> tuple[int, FinishReason | None, int | None]:
    """Decode everything anew after each token; what is unfinished at the end does not count."""
    start = len(TOKENIZER.decode(token_ids[:min_tokens]).rstrip("\ufffd"))
    for count in range(1, len(token_ids) + 1):
        text = TOKENIZER.decode(token_ids[:count])
        starts = [text.find(stop, start) for stop in stops if stop in text[start:]]
        if starts and count > min_tokens:
            return count, FinishReason.STOP_STRING, min(starts)
        if count == max_tokens:
            return count, FinishReason.LENGTH, None
    return len(token_ids), None, None
