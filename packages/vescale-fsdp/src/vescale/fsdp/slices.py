# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a planned buffer lie, as integers: of every lane, rank and tensor.

With N ranks, and lanes of S_k elements a rank: a rank's shard has the lanes one after the other,
[S] with S the sum of S_k, and the full buffer has N * S_k elements of each. ``tail`` elements more,
T, follow the last lane's part of every rank, to carry what is no tensor: a shard is then [S + T],
and a tensor of that lane which lies on several ranks is a few pieces of the full buffer.
"""

from dataclasses import dataclass
from functools import cached_property

from vescale.fsdp.lanes import AnyPlan


def flags_numel(plan: AnyPlan) -> int:
    """Return the tail that carries a flag for each tensor, and keeps every rank's part aligned.

    0 where there is nothing to carry them beside.
    """
    flags = len(plan.requests) if plan.shard_numel else 0
    return -(-flags // plan.align) * plan.align


@dataclass(frozen=True)
class Piece:
    """A view of the full buffer: [numel] elements, or [rows, numel] every ``stride``."""

    start: int
    numel: int
    rows: int = 1
    stride: int = 0


@dataclass(frozen=True)
class Slices:
    """The lanes of ``plan`` with a ``tail`` of T elements behind each rank's part of the last."""

    plan: AnyPlan
    tail: int = 0

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a rank's shard: S + T."""
        return self.plan.shard_numel + self.tail

    @cached_property
    def full_numel(self) -> int:
        """Elements of the full buffer: N * (S + T)."""
        return self.plan.world_size * self.shard_numel

    @cached_property
    def lanes(self) -> tuple[tuple[int, int, int, int], ...]:
        """``(shard_start, shard_numel, full_start, full_numel)`` of each lane, the tail included.

        One collective each, from the first interval of a shard to the second of the full buffer.
        """
        *others, (shard_start, numel, full_start, _) = self.plan.lane_ranges
        numel += self.tail
        return (*others, (shard_start, numel, full_start, self.plan.world_size * numel))

    def slots(self, rank: int) -> list[tuple[int, int]]:
        """Return ``(start, numel)`` in the full buffer of the rank's part of each lane."""
        return [(start + rank * numel, numel) for _, numel, start, _ in self.lanes]

    def pieces(self, start: int, numel: int) -> list[Piece]:
        """Return what covers [start, start + numel) of the plan's full buffer, in order.

        The interval lies in one lane. In the last one, where there is a tail, there are at most
        three: the end of one rank's part, whole parts as rows, the begin of the last one.
        """
        _, size, base, _ = self.plan.lane_ranges[-1]
        if not self.tail or start < base:
            return [Piece(start, numel)] if numel else []
        stride = size + self.tail
        pieces, end = [], start + numel
        while start < end:
            rank, inside = divmod(start - base, size)
            whole = (end - start) // size if inside == 0 else 0
            at = base + rank * stride + inside
            if whole:
                pieces.append(Piece(at, size, whole, stride))
                start += whole * size
            else:
                length = min(end - start, size - inside)
                pieces.append(Piece(at, length))
                start += length
        return pieces

    def gaps(self) -> list[tuple[int, int]]:
        """Return the padding of the plan's full buffer as (start, numel), in order; no tails."""
        plan = self.plan
        used = [(o, r.numel) for o, r in zip(plan.offsets, plan.requests, strict=True) if r.numel]
        ends = [(start + numel, 0) for _, _, start, numel in plan.lane_ranges]
        gaps, end = [], 0
        for offset, numel in sorted(used + ends):  # no tensor begins inside of another, nor a lane
            if offset > end:
                gaps.append((end, offset - end))
            end = max(end, offset + numel)
        return gaps

    def cuts(self, rank: int) -> tuple[list[int], list[int]]:
        """Return sizes that cut the rank's shard, and the place in them of each tensor's part."""
        ranges = [self.plan.local_range(index, rank)[1:] for index in range(self._tensors)]
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        sizes, place, end = [], [0] * len(ranges), 0
        for index in order:
            start, numel = ranges[index]
            if start > end:
                sizes.append(start - end)
            place[index] = len(sizes)
            sizes.append(numel)
            end = max(end, start + numel)
        if self.shard_numel > end or not sizes:
            sizes.append(self.shard_numel - end)
        return sizes, place

    @property
    def _tensors(self) -> int:
        return len(self.plan.requests)
