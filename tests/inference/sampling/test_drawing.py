"""One uniform, one token, never one of probability 0."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_inference.sampling.drawing import draw
from specrag_inference.sampling.numerics import NumericsError

ALMOST_ONE = float(np.nextafter(1.0, 0.0))


@given(
    weights=st.lists(st.integers(0, 3), min_size=1, max_size=12).filter(any),
    uniform=st.floats(0.0, ALMOST_ONE),
)
def test_drawn_token_is_the_one_whose_interval_holds_the_uniform(
    weights: list[int], uniform: float
) -> None:
    law = np.array(weights, dtype=np.float64) / sum(weights)
    token_id = draw(law, uniform)
    assert law[token_id] > 0
    edges = np.concatenate([[0.0], np.cumsum(law)])
    assert edges[token_id] - 1e-12 <= uniform <= edges[token_id + 1] + 1e-12


@pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_ONE])
def test_zeros_at_the_ends_are_never_drawn(uniform: float) -> None:
    law = np.array([0.0, 0.3, 0.0, 0.7, 0.0], dtype=np.float32)
    assert draw(law, uniform) in {1, 3}


def test_numbers_that_do_not_sum_to_one_are_scaled() -> None:
    law = np.array([0.2, 0.2], dtype=np.float32)
    assert [draw(law, uniform) for uniform in (0.0, 0.49, 0.51, ALMOST_ONE)] == [0, 0, 1, 1]


@pytest.mark.parametrize("values", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], [-1.0, 0.5]])
def test_law_without_mass_fails(values: list[float]) -> None:
    with pytest.raises(NumericsError, match="nothing can be drawn"):
        draw(np.array(values), 0.5)
