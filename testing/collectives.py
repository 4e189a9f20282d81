# SPDX-License-Identifier: Apache-2.0
"""Count the collectives that this process starts, and the bytes that it sends in them."""

import math
from collections import Counter

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # as torch's documentation has it

_SILENT = {"wait_tensor", "wrap_tensor_autograd"}  # they begin nothing


class CountCollectives(TorchDispatchMode):
    """While active, count collectives in ``counts[name]``, and this rank's bytes in ``nbytes``.

    Every group is taken to be the default one. Counted is what must leave the rank, whatever
    the algorithm: all but its own split of an all-to-all, its input once for each peer of an
    all-gather, all but its own share of a reduce-scatter, both of these for an all-reduce, and
    what the source of a broadcast sends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.nbytes = 0

    @property
    def total(self) -> int:
        return self.counts.total()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it take its operators apart, in sight of this mode
        name = func._schema.name.partition("::")[2].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and name not in _SILENT:
            self.counts[name] += 1
            self.nbytes += _sent_nbytes(name, args)
        return func(*args, **(kwargs or {}))


def _sent_nbytes(name: str, args: tuple) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = (world_size - 1) / world_size
    match name:
        case "alltoall_base" | "all_to_all_single":
            source = args[1] if name == "alltoall_base" else args[0]
            splits = args[4] if name == "alltoall_base" else args[2]
            row = math.prod(source.shape[1:]) * source.itemsize
            own = splits[rank] * row if splits else source.nbytes // world_size
            return source.nbytes - own
        case "allgather_base" | "all_gather_into_tensor":
            source = args[1] if name == "allgather_base" else args[0]
            return source.nbytes * (world_size - 1)
        case "reduce_scatter_base" | "reduce_scatter_tensor":
            source = args[1] if name == "reduce_scatter_base" else args[0]
            return round(source.nbytes * share)
        case "allgather_into_tensor_coalesced":
            return sum(source.nbytes for source in args[1]) * (world_size - 1)
        case "reduce_scatter_tensor_coalesced":
            return round(sum(source.nbytes for source in args[1]) * share)
        case "broadcast":
            source = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            return source.nbytes * (world_size - 1) if args[2] == rank else 0
        case "send":
            return sum(tensor.nbytes for tensor in args[0])
        case "recv":
            return 0
        case "allreduce" | "all_reduce":
            source = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            return round(2 * source.nbytes * share)
        case _:
            raise NotImplementedError(f"{name}: say in testing/collectives.py what it sends.")
