import numpy as np
import pytest

from bench.merging.coupled_rounds import (
    DeviatingDrafter,
    ModelDrafter,
    SuffixSource,
    Tally,
    replay_rounds,
)

ANSWER = [5, 6, 7, 8, 9, 5, 6, 7, 8, 4]


def choices(*, wrong_at: tuple[int, ...] = ()) -> np.ndarray:
    """Return choices by rank: the answer first, but second where ``wrong_at`` says so."""
    ranked = np.array([[token_id, 3] for token_id in ANSWER], dtype=np.int32)
    ranked[list(wrong_at)] = ranked[list(wrong_at), ::-1]
    return ranked


def replay(*drafters: ModelDrafter | SuffixSource, gamma: int = 4) -> Tally:
    return replay_rounds(ANSWER, drafters, gamma=gamma, max_nodes=64)


def test_a_perfect_drafter_gives_gamma_and_one_tokens_a_round() -> None:
    tally = replay(ModelDrafter(choices(), ANSWER))
    assert tally == Tally(
        num_rounds=2, num_tokens=10, num_nodes=8, num_uncut_rounds=2, num_uncut_tokens=10
    )


def test_a_round_with_too_few_tokens_left_counts_as_cut() -> None:
    tally = replay(ModelDrafter(choices(), ANSWER), gamma=8)
    assert (tally.num_rounds, tally.num_uncut_rounds) == (2, 1)
    assert tally.tokens_an_uncut_round == 9


def test_a_wrong_token_ends_the_round() -> None:
    tally = replay(ModelDrafter(choices(wrong_at=(0, 1)), ANSWER))
    assert (tally.num_rounds, tally.num_tokens) == (4, 10)


def test_merged_drafters_accept_what_the_better_one_accepts() -> None:
    drafters = [ModelDrafter(choices(wrong_at=(one,)), ANSWER) for one in (0, 5)]
    assert replay(*drafters).num_rounds == 2


def test_a_branch_goes_no_further_than_its_own_drafter_although_another_knows_better() -> None:
    drafters = [ModelDrafter(choices(wrong_at=(one,)), ANSWER) for one in (0, 2)]
    assert replay(*drafters).num_rounds == 3


def test_a_second_branch_mends_a_wrong_first_token() -> None:
    wrong = choices(wrong_at=(0, 5))
    assert replay(ModelDrafter(wrong, ANSWER, num_branches=2)).num_rounds == 2
    assert replay(ModelDrafter(wrong, ANSWER)).num_rounds > 2


def test_deviating_branches_mend_one_wrong_token_at_any_depth() -> None:
    wrong = choices(wrong_at=(2, 7))
    drafter = DeviatingDrafter(wrong, ANSWER, max_depth=4)
    assert replay(drafter).num_rounds == 2


def test_a_suffix_source_copies_from_its_prompt() -> None:
    source = SuffixSource([1, *ANSWER, 2], ANSWER, gamma=4)
    assert replay(source).num_rounds < len(ANSWER)


def test_no_drafters_decode_one_token_a_round() -> None:
    tally = replay()
    assert tally.tokens_a_round == pytest.approx(1.0)
    assert tally.num_rounds == len(ANSWER)
