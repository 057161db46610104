"""How the GPU checks measure: synchronised clocks, memory and its bandwidth, results to print."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how large the checks run.

    Attributes:
        device: where.
        tiny: toy sizes, so that every line can be run anywhere; figures then mean nothing.
    """

    device: torch.device
    tiny: bool

    @property
    def is_cuda(self) -> bool:
        """Whether the figures come from a GPU."""
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        text: what was found.
        passed: whether it meets its bar; ``None`` for a figure without one.
    """

    name: str
    text: str
    passed: bool | None = None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_median_s(
    work: Callable[[], object], device: torch.device, *, repeats: int, warm_ups: int = 2
) -> float:
    """Return the median seconds of ``work``, compilations and first touches left out."""
    for _ in range(warm_ups):
        work()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure_bandwidth(setting: Setting) -> float:
    """Return bytes a second that a large copy reads and writes together."""
    num_bytes = (64 << 20) if setting.tiny else 2 * GIB
    source = torch.ones(num_bytes, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    seconds = measure_median_s(lambda: target.copy_(source), setting.device, repeats=10)
    return 2 * num_bytes / seconds


def get_allocated_bytes(device: torch.device) -> int:
    """Return the device memory held by tensors; 0 on a CPU, which does not count it."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def get_total_bytes(device: torch.device) -> int | None:
    """Return the memory of the device, or ``None`` on a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)
