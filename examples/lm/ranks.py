# SPDX-License-Identifier: Apache-2.0
"""This rank's place among its peers: device, threads, process group, small agreements."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from lm.errors import AGREED, BadInputError
from lm.stop import StopRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run, seen from one of them."""

    rank: int
    world_size: int
    device: torch.device
    stop: StopRequest

    @property
    def leads(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def mean(self, value: float) -> tuple[float, bool]:
        """Return the mean of all ranks' values, and whether any of them was asked to stop.

        One small all-reduce: what is learnt in it, all ranks learn at the same step.
        """
        total = torch.tensor([value, bool(self.stop)], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        total, stopped = total.tolist()
        return total / self.world_size, stopped > 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's ``value``, any object that can be pickled."""
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def check(self, read: Callable[[], T]) -> T:
        """Return ``read()``; if it raises BadInputError anywhere, raise the first on every rank."""
        result, problem = None, None
        try:
            result = read()
        except BadInputError as error:
            problem = str(error)
        problems = [(i, text) for i, text in enumerate(self.gather(problem)) if text]
        if problems:
            rank, text = problems[0]
            raise BadInputError(text if rank == 0 else f"{text} (on rank {rank} only)")
        return result


@contextmanager
def join(device: str, threads: int | None, stop: StopRequest) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, or be the only one; leave them at the end.

    Raises BadInputError where the device is not there.
    """
    local_rank, local_ranks = _environ("LOCAL_RANK", 0), _environ("LOCAL_WORLD_SIZE", 1)
    rank, world_size = _environ("RANK", 0), _environ("WORLD_SIZE", 1)
    chosen = _device(device, local_rank, local_ranks)
    gpu = chosen.type == "cuda"
    if gpu:
        torch.cuda.set_device(chosen)
    else:
        torch.set_num_threads(threads or _threads(local_ranks))
    # Without torchrun nobody serves a store, and one rank needs none but its own memory.
    store = None if "WORLD_SIZE" in os.environ else dist.HashStore()
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=chosen if gpu else None,
    )
    try:
        yield Ranks(rank, world_size, chosen, stop)
    except AGREED:
        dist.destroy_process_group()
        raise
    # Not after other errors: a peer may hang in a collective, and this would join it.
    dist.destroy_process_group()


def _device(device: str, local_rank: int, local_ranks: int) -> torch.device:
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if device == "cuda" and gpus < local_ranks:
        raise BadInputError(
            f"--device cuda needs a GPU and NCCL for each of {local_ranks} ranks and found {gpus}; "
            "start fewer ranks or use --device cpu."
        )
    if device == "cpu" or gpus < local_ranks:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def _threads(local_ranks: int) -> int:
    # torchrun sets 1 for whoever chose nothing; on a machine of many cores that wastes them.
    wished = _environ("OMP_NUM_THREADS", 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return wished if wished > 1 else max(1, (cores or 1) // local_ranks)


def _environ(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default
