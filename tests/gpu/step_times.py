"""How long one verification pass takes, beside what reading weights and keys alone would take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrag_inference.models.quantization import count_weight_bytes

from tests.gpu.measuring import Finding, Setting, measure_bandwidth, measure_median_s
from tests.inference.passes import Rig, Share, draw_tokens, lay_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specrag_inference.models.loading import LoadedModel

NODE_COUNTS = (1, 8, 16, 32, 64)
TARGET_SHARE = 0.5
"""Least share of the memory limit that a step over eight nodes is to reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimit:
    """What one pass cannot beat.

    Attributes:
        weight_bytes: read by every pass; of the input embedding only a few rows.
        kv_bytes_per_token: keys and values of one token, all layers.
        bandwidth: bytes a second.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    bandwidth: float

    def compute_s(self, context: int) -> float:
        """Return the seconds of reading weights and ``context`` tokens once."""
        return (self.weight_bytes + self.kv_bytes_per_token * context) / self.bandwidth


def check_step_times(
    model: LoadedModel, setting: Setting, *, graphs: bool = False
) -> Iterator[Finding]:
    """Time passes of one sequence over trees of several sizes at two contexts."""
    limit = measure_limit(model, setting)
    yield Finding(
        name="memory limit",
        text=f"{limit.weight_bytes / 1e9:.2f} GB of weights at {limit.bandwidth / 1e9:.0f} GB/s: "
        f"{1000 * limit.compute_s(0):.2f} ms a pass",
    )
    for context in (64, 128) if setting.tiny else (2048, 8192):
        rig = build_rig(model, context, graphs=graphs)
        for num_nodes in NODE_COUNTS:
            seconds = time_tree_step(rig, context, num_nodes, setting)
            share = limit.compute_s(context) / seconds
            yield Finding(
                name=f"step over {num_nodes} nodes at {context} tokens"
                + (", graphs" if graphs else ""),
                text=f"{1000 * seconds:.2f} ms, {share:.0%} of the memory limit",
                passed=share > TARGET_SHARE if num_nodes == 8 and setting.is_cuda else None,
            )


def measure_limit(model: LoadedModel, setting: Setting) -> StepLimit:
    """Return what bounds a pass on this device."""
    module: Any = model.module
    embedding = module.get_input_embeddings().weight
    is_tied = module.config.get_text_config().tie_word_embeddings
    unread = 0 if is_tied else embedding.numel() * embedding.element_size()
    kv_numbers = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return StepLimit(
        weight_bytes=count_weight_bytes(module) - unread,
        kv_bytes_per_token=kv_numbers * model.dtype.itemsize,
        bandwidth=measure_bandwidth(setting),
    )


def build_rig(model: LoadedModel, context: int, *, graphs: bool = False) -> Rig:
    """Return a rig with room for one sequence of ``context`` tokens and its trees."""
    return Rig(
        model,
        "flex",
        block_size=16,
        num_blocks=context // 16 + 16,
        vocab_size=256,
        cuda_graphs=graphs,
    )


def time_tree_step(rig: Rig, context: int, num_nodes: int, setting: Setting) -> float:
    """Return the median seconds of a pass over a last token and ``num_nodes`` in four branches.

    The context is counted as cached without being computed: its keys are zeros, which read alike.
    """
    table = rig.build_table()
    table.reserve(context)
    table.extend(context)
    parents = tuple(max(-1, node - 4) for node in range(num_nodes))
    share = Share(table=table, chain=[1], parents=parents, nodes=draw_tokens(1, num_nodes))
    step = lay_out([share])
    seconds = measure_median_s(
        lambda: rig.runner.execute(step), setting.device, repeats=3 if setting.tiny else 20
    )
    table.free()
    return seconds
