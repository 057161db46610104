"""Two quantised 8B drafters on one GPU: memory, and drafting on both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_inference.models.quantization import count_weight_bytes, quantize_model

from tests.gpu.measuring import GIB, Finding, Setting, get_allocated_bytes, get_total_bytes
from tests.gpu.models import build_shaped_model
from tests.gpu.throughput import GAMMA, build_engine, measure_draft_rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specrag_inference.engine import Engine
    from specrag_inference.plan import QuantizationName

SMALL_GPU_BYTES = 24 * GIB
"""A card that two fp8 drafters of 8B parameters and their caches should fit."""


def check_two_drafters(setting: Setting) -> Iterator[Finding]:
    """Build, quantise and run two drafters beside each other."""
    quantization: QuantizationName = "fp8" if setting.is_cuda else "int8"
    before = get_allocated_bytes(setting.device)
    engines: list[Engine] = []
    weight_bytes = full_bytes = 0
    for _ in range(2):
        model = build_shaped_model(setting.device, tiny=setting.tiny)
        full_bytes = count_weight_bytes(model.module)
        quantize_model(model.module, quantization)
        weight_bytes = count_weight_bytes(model.module)
        engines.append(build_engine(model, num_tokens=256 if setting.tiny else 8192))
    held = get_allocated_bytes(setting.device) - before
    total = get_total_bytes(setting.device)
    yield Finding(
        name=f"two {quantization} drafters",
        text=f"{weight_bytes / 1e9:.3f} GB of weights each ({full_bytes / 1e9:.3f} unquantised), "
        f"{held / 1e9:.2f} GB held by both with caches of 8,192 tokens",
        passed=None if total is None else held < min(total, SMALL_GPU_BYTES),
    )
    context, num_rounds = (64, 2) if setting.tiny else (2048, 8)
    for index, engine in enumerate(engines):
        rate = measure_draft_rate(engine, setting, context=context, num_rounds=num_rounds)
        yield Finding(
            name=f"{quantization} drafter {index + 1} of 2",
            text=f"{rate:.0f} tokens/s in bursts of {GAMMA}, in turns with the other",
            passed=rate > 100 if setting.is_cuda else None,
        )
        engine.close()
