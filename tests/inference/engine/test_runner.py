"""Which output rows are tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specrag_inference.runner import LogitRows, TokenVocabulary


def test_ids_beyond_the_tokenizer_are_cut_and_holes_can_never_win() -> None:
    vocabulary = TokenVocabulary.from_ids([0, 1, 3, 4, 99], model_vocab_size=8)
    assert vocabulary.size == 5
    assert vocabulary.holes.tolist() == [2]
    logits = torch.tensor([[1.0, 2.0, 50.0, 3.0, 2.5, 60.0, 60.0, 60.0]])
    row = LogitRows(logits[:, : vocabulary.size], vocabulary.holes).row(0)
    assert row.shape == (5,)
    assert int(row.argmax()) == 3
    assert np.isfinite(row).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_fp32_copies_of_the_pass(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 2.0]], dtype=dtype)
    rows = LogitRows(logits, np.empty(0, dtype=np.int64))
    rows.row(0)[:] = 9
    assert rows.row(0).tolist() == [1.0, 2.0]
    assert rows.row(0).dtype == np.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_softmax_over_the_tokens(dtype: torch.dtype) -> None:
    logits = torch.randn(150, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    holes = np.array([2, 5], dtype=np.int64)
    row_idx = [3, 3, *range(149, -1, -1)]
    token_ids = [0, 6, *([1, 3, 4] * 50)]
    found = LogitRows(logits, holes).compute_logprobs(row_idx, token_ids)
    kept = np.array([0, 1, 3, 4, 6])
    law = torch.log_softmax(logits.double()[:, kept], dim=-1).numpy()
    expected = law[row_idx, np.searchsorted(kept, token_ids)]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.dtype == np.float32


def test_logprobs_of_a_broken_row_are_nan_and_of_no_row_empty() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 3] = float("nan")
    rows = LogitRows(logits, np.empty(0, dtype=np.int64))
    assert np.isnan(rows.compute_logprobs([0, 1], [0, 0])).tolist() == [False, True]
    assert rows.compute_logprobs([], []).shape == (0,)
