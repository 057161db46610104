"""The process group that the model's collectives run in."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Final

import torch
from torch import distributed
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from specrag_inference.parallel.messages import RankPlace

LOADING_TIMEOUT_S: Final = 1800.0
"""Ranks read large models at different speeds."""

GLOO_TIMEOUT_S: Final = 8.0
"""Ranks run the same layers in step; this far apart, one of them is stuck."""

NCCL_TIMEOUT_S: Final = 120.0
"""First passes compile kernels, not equally fast on all ranks."""


def join_group(place: RankPlace) -> None:
    """Enter the replica's process group: NCCL where there are GPUs, else gloo."""
    _tell_libraries(place)
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(place.local_rank)
    distributed.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.size,
        timeout=datetime.timedelta(seconds=LOADING_TIMEOUT_S),
        device_id=torch.device("cuda", place.local_rank) if has_gpu else None,
    )


def leave_group() -> None:
    """Give the group's connections and threads back; harmless when there is none."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def limit_collectives() -> None:
    """Let collectives fail soon from here on: the model is loaded, ranks run in step."""
    seconds = NCCL_TIMEOUT_S if torch.cuda.is_available() else GLOO_TIMEOUT_S
    # torch has no public way to change the limit of the default group, which transformers uses.
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds))


def share_threads(num_threads: int | None, num_ranks: int) -> int:
    """Return the torch threads of one rank, at least one."""
    return max(1, (num_threads or torch.get_num_threads()) // num_ranks)


def _tell_libraries(place: RankPlace) -> None:
    """Set what transformers and gloo read from the environment and nowhere else."""
    environment = os.environ  # noqa: TID251 - the libraries offer no other way
    environment["LOCAL_RANK"] = str(place.local_rank)
    if place.init_method.startswith("file://"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
