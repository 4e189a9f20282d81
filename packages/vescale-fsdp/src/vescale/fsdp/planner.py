# SPDX-License-Identifier: Apache-2.0
"""Place tensors in one flat buffer so that no block is split between two ranks.

Every size and offset is in elements, not bytes. The buffer is ``world_size * shard_numel`` long;
rank ``i`` owns ``[i * shard_numel, (i + 1) * shard_numel)``. The goal, and the three orders that
are tried first, are those of arXiv:2602.22437 (veScale-FSDP); the search is our own.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from vescale.fsdp.shard_search import search_layout
from vescale.fsdp.validate import validate_plan

__all__ = ["SLICE_ALIGN_BYTES", "Plan", "Request", "plan", "slice_align", "validate_plan"]

SLICE_ALIGN_BYTES = 16  # slower collectives below it: pytorch/pytorch #195450


@dataclass(frozen=True, slots=True)
class Request:
    """One tensor to place: ``numel`` elements, kept whole in runs of ``block``.

    A ``block`` larger than ``numel`` counts as ``numel``: the tensor is never cut. Where ``block``
    does not divide ``numel``, only the last block is short. ``numel`` may be 0.
    """

    fqn: str
    numel: int
    block: int = 1

    def __post_init__(self) -> None:
        for name, least in (("numel", 0), ("block", 1)):
            value = checked_integer(getattr(self, name), f"{self.fqn}: {name}", least)
            object.__setattr__(self, name, value)


class Sizes:
    """How much of a planned buffer is tensors, and how much is padding."""

    __slots__ = ()

    if TYPE_CHECKING:  # of the plans that derive from this
        requests: Any
        world_size: Any
        shard_numel: Any

    @property
    def numel(self) -> int:
        """Elements of all tensors together."""
        return sum(request.numel for request in self.requests)

    @property
    def buffer_numel(self) -> int:
        """Elements of the whole buffer."""
        return self.world_size * self.shard_numel

    @property
    def padding_numel(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.buffer_numel - self.numel

    @property
    def padding(self) -> float:
        """``padding_numel / numel``; 0.0 where every tensor is empty."""
        return self.padding_numel / self.numel if self.numel else 0.0


@dataclass(frozen=True, slots=True)
class Plan(Sizes):
    """Where each request starts in the buffer, and how long every rank's shard is.

    ``offsets[i]`` is the start of ``requests[i]`` in the buffer (0 for an empty tensor, which lies
    nowhere). ``shard_numel`` is a multiple of ``align``, and 0 only where every tensor is empty.
    """

    requests: tuple[Request, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    world_size: int
    align: int = 1

    @property
    def lane_ranges(self) -> tuple[tuple[int, int, int, int], ...]:
        """``(shard_start, shard_numel, full_start, full_numel)`` of the only lane: everything."""
        return ((0, self.shard_numel, 0, self.buffer_numel),)

    def local_range(self, index: int, rank: int) -> tuple[int, int, int]:
        """Return ``(start_in_tensor, start_in_shard, numel)`` of tensor ``index`` on ``rank``.

        With ``numel == 0`` the rank holds nothing of the tensor, and both starts are clamped into
        the tensor and the shard. Raises IndexError for a rank outside ``[0, world_size)``.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(
                f"rank={rank} is outside [0, {self.world_size}); pass a rank of the plan."
            )
        numel, shard = self.requests[index].numel, self.shard_numel
        start = rank * shard - self.offsets[index]  # of the shard, in the tensor
        begin = min(max(start, 0), numel)
        end = min(max(start + shard, 0), numel)
        return begin, min(max(-start, 0), shard), end - begin

    def shard_sizes(self, index: int) -> tuple[int, ...]:
        """Return how many elements of tensor ``index`` each rank holds: [world_size]."""
        return tuple(chain.from_iterable(repeat(size, n) for size, n in self.shard_runs(index)))

    def shard_runs(self, index: int) -> tuple[tuple[int, int], ...]:
        """Return ``shard_sizes`` run-length encoded, at most five ``(numel, ranks)``; O(1).

        Only the first and the last rank that hold the tensor may hold less than a whole shard.
        """
        numel, shard, start = self.requests[index].numel, self.shard_numel, self.offsets[index]
        if not numel:
            return ((0, self.world_size),)
        first, last = start // shard, (start + numel - 1) // shard
        runs = [(0, first), (min(numel, (first + 1) * shard - start), 1)]
        if last > first:
            runs += [(shard, last - first - 1), (start + numel - last * shard, 1)]
        runs.append((0, self.world_size - 1 - last))
        return tuple((size, ranks) for size, ranks in runs if ranks)


def plan(requests: Sequence[Request], world_size: int, *, align: int = 1) -> Plan:
    """Return a valid plan with equal shards whose size the search made as small as it could.

    Every shard's size is a multiple of ``align`` elements. The plan depends on ``world_size``,
    ``align`` and the sizes only, so all ranks compute the same one; equal groups are planned once.
    Raises TypeError or ValueError for sizes that are no positive integers.
    """
    world_size = checked_integer(world_size, "world_size", 1)
    align = checked_integer(align, "align", 1)
    requests = checked_requests(requests)
    sizes = tuple((r.numel, max(1, min(r.block, r.numel))) for r in requests)
    offsets, shard_numel = _layout(sizes, world_size, align)
    return Plan(requests, offsets, shard_numel, world_size, align)


def slice_align(itemsize: int) -> int:
    """Return the elements that a rank's part must be a multiple of, to begin on 16 bytes.

    ``itemsize`` is in bytes, of the narrowest dtype that the layout is used with.
    """
    return SLICE_ALIGN_BYTES // math.gcd(SLICE_ALIGN_BYTES, itemsize)


@lru_cache(maxsize=4096)
def _layout(
    sizes: tuple[tuple[int, int], ...], world_size: int, align: int
) -> tuple[tuple[int, ...], int]:
    kept = [i for i, (numel, _) in enumerate(sizes) if numel]
    offsets = [0] * len(sizes)
    shard_numel = 0
    if kept:
        starts, shard_numel = search_layout([sizes[i] for i in kept], world_size, align)
        for i, start in zip(kept, starts, strict=True):
            offsets[i] = start
    requests = tuple(Request(str(i), *size) for i, size in enumerate(sizes))
    validate_plan(Plan(requests, tuple(offsets), shard_numel, world_size, align))
    return tuple(offsets), shard_numel


def checked_requests(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return ``requests`` as a tuple; raise TypeError if it holds anything else."""
    if not isinstance(requests, Iterable):
        raise TypeError(
            f"requests is a {type(requests).__name__}, expected a list of Request(fqn, numel, "
            "block), one for each tensor."
        )
    found = tuple(requests)
    for place, request in enumerate(found):
        if not isinstance(request, Request):
            raise TypeError(
                f"requests[{place}] is a {type(request).__name__}, expected a Request(fqn, numel, "
                "block)."
            )
    return found


def checked_integer(value: int, name: str, least: int) -> int:
    """Return ``value`` as an int; raise TypeError or ValueError if it is none from ``least`` on."""
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is no integer; pass a count of elements.") from None
    if value < least:
        raise ValueError(f"{name}={value} is below {least}; pass an integer of at least {least}.")
    return value
