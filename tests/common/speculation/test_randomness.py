"""Counter-based random numbers: stable, addressed, independent."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from specrag_common.speculation import randomness
from specrag_common.speculation.randomness import (
    Purpose,
    RandomStream,
    new_random_key,
    random_key_from_seed,
)

STREAM = RandomStream(random_key_from_seed(7))


def test_numbers_of_a_seed_are_the_same_forever() -> None:
    assert random_key_from_seed(7).hex() == "9f0fceca3013a0fe60bbba0113fe8624"
    assert [
        STREAM.uniform(purpose, position=3, drafter_index=1, branch_idx=2, trial=4)
        for purpose in Purpose
    ] == [0.3766270159728434, 0.9714953144444309, 0.222197900099254, 0.9346079709595735]
    np.testing.assert_allclose(
        STREAM.gumbel(3, 5),
        [
            0.020849862444826457,
            2.9607428559095834,
            1.5908114437214094,
            0.7858666866445155,
            1.861244662937451,
        ],
        rtol=1e-12,
    )


def test_every_part_of_the_key_gives_its_own_number() -> None:
    uniforms = {
        STREAM.uniform(
            purpose, position=position, drafter_index=drafter, branch_idx=branch, trial=trial
        )
        for purpose in Purpose
        for position, drafter, branch, trial in product(range(4), repeat=4)
    }
    assert len(uniforms) == 4**5


def test_numbers_do_not_depend_on_what_was_asked_before() -> None:
    fresh = RandomStream(random_key_from_seed(7))
    assert fresh.uniform(Purpose.FINAL, position=9) == STREAM.uniform(Purpose.FINAL, position=9)


@given(
    position=st.integers(0, 10**6),
    small=st.integers(1, 300),
    large=st.integers(300, 3000),
)
def test_gumbel_at_a_token_does_not_depend_on_the_vocabulary_size(
    position: int, small: int, large: int
) -> None:
    gumbel = STREAM.gumbel(position, large)
    assert (gumbel[:small] == STREAM.gumbel(position, small)).all()
    token_ids = np.array([small - 1, 0, small // 2])
    assert (STREAM.gumbel_at(position, token_ids) == gumbel[token_ids]).all()


@pytest.mark.congruence
@given(seed=st.integers(0, 10**9), size=st.integers(1, 400), scale=st.floats(0.0, 30.0))
def test_bounded_argmax_equals_the_plain_one(seed: int, size: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    weights = np.exp(rng.normal(size=size) * scale)
    probs = np.maximum(weights / weights.sum(), 1e-30).astype(np.float32)
    token_ids = np.sort(rng.choice(1000, size=size, replace=False))
    scores = np.log(probs.astype(np.float64)) + STREAM.gumbel_at(seed % 1000, token_ids)
    assert STREAM.gumbel_argmax(seed % 1000, token_ids, probs) == int(np.argmax(scores))


@pytest.mark.statistical
def test_uniforms_and_gumbels_follow_their_laws() -> None:
    """Kolmogorov-Smirnov; false-alarm rate 1e-4 each, seeds fixed; a squared uniform is caught."""
    uniforms = np.array([STREAM.uniform(Purpose.ACCEPT, position=idx) for idx in range(4000)])
    assert stats.kstest(uniforms, "uniform").pvalue > 1e-4
    assert stats.kstest(uniforms**2, "uniform").pvalue < 1e-9
    assert stats.kstest(STREAM.gumbel(0, 20000), "gumbel_r").pvalue > 1e-4
    across = np.array([STREAM.gumbel(idx, 3)[2] for idx in range(4000)])
    assert stats.kstest(across, "gumbel_r").pvalue > 1e-4


def test_uniform_is_below_one_and_gumbel_is_finite() -> None:
    extreme = np.array([0, 2**64 - 1], dtype=np.uint64)
    assert np.isfinite(randomness._gumbel_from_raw(extreme)).all()
    assert all(0.0 <= STREAM.uniform(Purpose.DRAFT, position=idx) < 1.0 for idx in range(1000))


def test_fresh_keys_differ_and_seeds_of_any_size_are_hashed() -> None:
    assert new_random_key() != new_random_key()
    seeds = [0, 1, -1, 2**64, 2**64 + 1, -(2**100)]
    assert len({random_key_from_seed(seed) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("length", [0, 15, 17])
def test_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} bytes, expected 16"):
        RandomStream(bytes(length))


@pytest.mark.parametrize("name", ["position", "drafter_index", "branch_idx", "trial"])
@pytest.mark.parametrize("value", [-1, 2**32])
def test_key_part_out_of_range_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        STREAM.uniform(Purpose.DRAFT, **{"position": 0, name: value})
