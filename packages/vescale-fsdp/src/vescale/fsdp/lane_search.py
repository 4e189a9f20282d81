# SPDX-License-Identifier: Apache-2.0
"""Divide the tensors of one group into lanes: buffers with shards of their own.

One long tensor with an awkward row forces its block on the shard, and the least common multiple
with other such blocks may be large. Buffers of their own for the two are free of each other. All
sizes are in elements; effort is bounded by counts, so all ranks find the same lanes.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from vescale.fsdp.packing import Class, Group
from vescale.fsdp.shard_search import lower_bound, smallest_shard

Kinds = tuple[int, ...]  # indices of kinds, ascending: the contents of a lane

MOST_LANES = 3
MOST_KINDS = 6  # kinds of tensors that are divided; what is left of a group moves as one
LANE_STEPS = 6_000  # tensors of all lanes that are searched for one group
LANE_EFFORT = 20_000  # effort to interleave the classes of one lane


class LaneSearch:
    """The lanes of one group, each searched once, with kinds of tensors as the unit.

    ``sizes`` are those of the group's tensors ``(numel, block)``, none of them empty; ``single`` is
    the shard size of one lane for all. ``kinds`` are the indices of the tensors of each kind: at
    least ``least`` kinds, where there are as many tensors.
    """

    def __init__(
        self, sizes: Sequence[Class], world_size: int, align: int, single: int, least: int = 1
    ) -> None:
        self.sizes, self.world_size, self.align = sizes, world_size, align
        self.kinds = kinds_of_blocks(sizes, world_size, align, least)
        self.steps = LANE_STEPS
        self._groups: dict[Kinds, Group] = {}
        self._bounds: dict[Kinds, int] = {}
        self._shards: dict[Kinds, int] = {tuple(range(len(self.kinds))): single}

    def members(self, lane: Kinds) -> list[int]:
        """Return the indices of a lane's tensors, ascending."""
        return sorted(index for kind in lane for index in self.kinds[kind])

    def group(self, lane: Kinds) -> Group:
        """Return the tensors of a lane, in the order of the input."""
        if lane not in self._groups:
            sizes = [self.sizes[index] for index in self.members(lane)]
            self._groups[lane] = Group.of(sizes, self.world_size, self.align)
        return self._groups[lane]

    def bound(self, lane: Kinds) -> int:
        """Return a shard size that the lane cannot be below."""
        if lane not in self._bounds:
            self._bounds[lane] = lower_bound(self.group(lane))
        return self._bounds[lane]

    def shard(self, lane: Kinds) -> int:
        """Return the smallest shard size found for the lane."""
        if lane not in self._shards:
            group = self.group(lane)
            self.steps -= len(group.members)
            self._shards[lane] = smallest_shard(group, effort=LANE_EFFORT)[0]
        return self._shards[lane]

    def best(self, counts: Sequence[int], itemsize: int, lane_nbytes: int) -> tuple[Kinds, ...]:
        """Return the division into one of ``counts`` lanes of least cost found, in bytes.

        The cost is ``itemsize`` for each element of a shard, and ``lane_nbytes`` for each lane.
        Divisions are searched by their lower bound, until none can be better or, once there is
        one, enough tensors were placed.
        """
        divisions = []
        for lanes in divide(len(self.kinds), max(counts)):
            if len(lanes) in counts:
                bound = itemsize * sum(map(self.bound, lanes)) + lane_nbytes * len(lanes)
                divisions.append((bound, len(lanes), lanes))
        best: float = math.inf
        chosen: tuple[Kinds, ...] = ()
        if 1 in counts:  # known already
            whole = tuple(range(len(self.kinds)))
            chosen = (whole,)
            best = itemsize * self.shard(whole) + lane_nbytes
        for bound, _, lanes in sorted(divisions):
            if chosen and (bound >= best or self.steps <= 0):
                break
            cost = bound
            for lane in lanes:
                cost += itemsize * (self.shard(lane) - self.bound(lane))
                if cost >= best:
                    break
            else:
                best, chosen = cost, lanes
        return chosen


def kinds_of_blocks(
    sizes: Sequence[Class], world_size: int, align: int, least: int = 1
) -> list[tuple[int, ...]]:
    """Return the indices of the tensors of each kind: of equal blocks, long ones and short ones.

    Long is what exceeds an even share of a rank, so that it must meet a boundary. Tensors that are
    cut anywhere are one kind, and so are those left over when there are too many kinds. With less
    than ``least`` kinds, the one of most tensors is halved.
    """
    share = sum(numel for numel, _ in sizes) // world_size
    found: dict[tuple[bool, int], list[int]] = {}
    for index, (numel, block) in enumerate(sizes):
        key = (False, 1) if align % block == 0 else (numel > share, block)
        found.setdefault(key, []).append(index)
    longest = sorted(found.values(), key=lambda kind: -max(sizes[index][0] for index in kind))
    rest = sorted(chain(*longest[MOST_KINDS:]))
    kinds = longest[:MOST_KINDS] + ([rest] if rest else [])
    while len(kinds) < min(least, len(sizes)):
        kinds.sort(key=len)
        most = kinds.pop()
        kinds += [most[: len(most) // 2], most[len(most) // 2 :]]
    return sorted(map(tuple, kinds))


def divide(count: int, most: int) -> Iterator[tuple[Kinds, ...]]:
    """Yield all ways to divide ``range(count)`` into at most ``most`` sets, none empty."""

    def extend(index: int, lanes: list[list[int]]) -> Iterator[tuple[Kinds, ...]]:
        if index == count:
            yield tuple(tuple(lane) for lane in lanes)
            return
        for lane in lanes:
            lane.append(index)
            yield from extend(index + 1, lanes)
            lane.pop()
        if len(lanes) < most:
            lanes.append([index])
            yield from extend(index + 1, lanes)
            lanes.pop()

    return extend(0, [])
