"""The flex backend against the dense one, family by family, in fp32 and bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.gpu.measuring import Finding, Setting
from tests.inference.models.families import CONFIGS, ReferenceModel
from tests.inference.passes import Rig, Share, draw_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from specrag_inference.models.loading import LoadedModel

BLOCK_SIZE = 16
FP32_TOLERANCE = 1e-4
BF16_FACTOR = 2.0
"""In bf16 both backends round; flex may differ from dense by this much of dense's own error."""

TREE = (-1, -1, 0, 0, 2, 1, 4, 4, 6, 8)


def check_congruence(setting: Setting) -> Iterator[Finding]:
    """Compare one mixed pass of four sequences on both backends."""
    names = list(CONFIGS)[:2] if setting.tiny else list(CONFIGS)
    for name in names:
        reference = ReferenceModel(name)
        exact = reference.load(torch.float32, setting.device)
        dense, flex = (run_mixed_pass(exact, backend) for backend in ("dense", "flex"))
        error = float(np.abs(flex - dense).max())
        yield Finding(
            name=f"flex = dense, {name}, fp32",
            text=f"largest difference of logits {error:.1e}",
            passed=error < FP32_TOLERANCE,
        )
        rounded = reference.load(torch.bfloat16, setting.device)
        own_error = float(np.abs(run_mixed_pass(rounded, "dense") - dense).max())
        error = float(np.abs(run_mixed_pass(rounded, "flex") - dense).max())
        yield Finding(
            name=f"flex = dense, {name}, bf16",
            text=f"error against fp32 {error:.3f}, dense's own {own_error:.3f}",
            passed=error < BF16_FACTOR * own_error,
        )


def run_mixed_pass(model: LoadedModel, backend: str) -> NDArray[np.float32]:
    """Return all logits of a pass with a prefill, a decode step and two trees."""
    rig = Rig(model, backend, block_size=BLOCK_SIZE, num_blocks=64)
    prompts = [draw_tokens(seed, length) for seed, length in ((1, 20), (2, 47), (3, 32), (4, 60))]
    nodes = draw_tokens(9, len(TREE))
    shares = [
        Share(table=rig.build_table(), chain=prompts[0]),
        Share(table=rig.prefill(prompts[1][:-1]), chain=prompts[1][-1:]),
        Share(table=rig.prefill(prompts[2], chunk=16), parents=TREE, nodes=nodes),
        Share(table=rig.prefill(prompts[3][:40]), chain=prompts[3][40:], parents=TREE, nodes=nodes),
    ]
    return np.concatenate(rig.run(shares))
