# SPDX-License-Identifier: Apache-2.0
"""Flat ranges, boxes and exchange counts: the index arithmetic of ragged tensors.

Every number is in elements, not bytes. Pure Python: no communication, no tensor.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vescale.dtensor.placement import RaggedShard
from vescale.dtensor.runs import Runs, canonical, expand

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """One rank's part of a ragged tensor.

    ``base_shape`` and ``base_offset`` are the block that the other placements leave on this rank;
    ``[start, end)`` is this rank's range in that block's row-major memory; ``axis`` is the mesh
    axis that the ragged placement cuts over. ``pending`` says that the values still have to be
    reduced over another axis.
    """

    placement: RaggedShard
    axis: int
    base_shape: Shape
    base_offset: Shape
    start: int
    end: int
    pending: bool = False

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def split_numels(self) -> tuple[int, ...]:
        """Every rank's number of elements along ``axis``; linear in the axis size, and not kept."""
        return self.placement.split_numels(self.base_shape)

    @functools.cached_property
    def split_runs(self) -> Runs:
        """``split_numels`` run-length encoded, which tells layouts apart as well."""
        return self.placement.split_runs(self.base_shape)

    @functools.cached_property
    def block_shape(self) -> Shape:
        """``(rows, *base_shape[k:])``; for ``dims=()`` the whole shape, or no rows of it."""
        k = len(self.placement.dims)
        if k == 0:
            return self.base_shape if self._owns_all else (0, *self.base_shape[1:])
        row_shape = self.base_shape[k:]
        row_numel = math.prod(row_shape)
        rows = self.numel // row_numel if row_numel else 0
        return (rows, *row_shape)

    @property
    def _owns_all(self) -> bool:
        return self.numel == math.prod(self.base_shape)

    @functools.cached_property
    def boxes(self) -> tuple["Box", ...]:
        """This rank's part as boxes of the whole tensor, in storage order."""
        return tuple(
            Box(
                box.start,
                tuple(map(sum, zip(box.offset, self.base_offset, strict=True))),
                box.shape,
            )
            for box in boxes_of_range(self.start, self.end, self.base_shape)
        )

    def __copy__(self) -> "Layout":
        return self

    def __deepcopy__(self, memo: dict) -> "Layout":
        return self


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned block of a tensor that is contiguous in a flat range.

    ``start`` counts elements from the beginning of the range.
    """

    start: int
    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@functools.lru_cache(maxsize=4096)
def make_layout(
    placement: RaggedShard,
    axis: int,
    base_shape: Shape,
    base_offset: Shape,
    rank: int,
    pending: bool = False,
) -> Layout:
    """Return the layout of ``rank`` (its place on mesh axis ``axis``); cached by value."""
    start, end = placement.split(base_shape, rank)
    return Layout(placement, axis, base_shape, base_offset, start, end, pending)


def boxes_of_range(start: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    """Cover the row-major range ``[start, end)`` of ``shape`` by boxes, in storage order.

    At most ``2n - 1`` boxes for ``n = len(shape) >= 1`` dims, no element twice; none when the
    range is empty. No two boxes begin at the same offset.
    """
    position = 0
    for offset, box_shape in _cover(start, end, tuple(shape)):
        yield Box(position, offset, box_shape)
        position += math.prod(box_shape)


def _cover(start: int, end: int, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    if end <= start:
        return
    if not shape:
        yield (), ()
        return
    slab, inner = math.prod(shape[1:]), shape[1:]
    (first, head), (last, tail) = divmod(start, slab), divmod(end, slab)
    if first == last:  # inside one slab
        for offset, size in _cover(head, tail, inner):
            yield (first, *offset), (1, *size)
        return
    if head:  # the end of the first slab
        for offset, size in _cover(head, slab, inner):
            yield (first, *offset), (1, *size)
        first += 1
    if last > first:  # whole slabs
        yield (first, *(0,) * len(inner)), (last - first, *inner)
    if tail:  # the beginning of the last slab
        for offset, size in _cover(0, tail, inner):
            yield (last, *offset), (1, *size)


def exchange_counts(
    source: Sequence[int], target: Sequence[int], rank: int
) -> tuple[list[int], list[int]]:
    """Return how many elements ``rank`` sends to, and receives from, every rank.

    ``source`` and ``target`` are two ways to cut the same flat range into one contiguous part per
    rank (elements per rank, equal sums). In rank order both sides read and write contiguously.
    """
    return _overlaps(source, target, rank), _overlaps(target, source, rank)


def _overlaps(mine: Sequence[int], theirs: Sequence[int], rank: int) -> list[int]:
    start = sum(mine[:rank])
    end, other = start + mine[rank], 0
    counts = []
    for numel in theirs:
        counts.append(max(0, min(end, other + numel) - max(start, other)))
        other += numel
    return counts


def pieces_by_chunk(
    boxes: Sequence[Box], dim: int, lengths: Sequence[int]
) -> list[list[tuple[Box, int, int]]]:
    """Cut ``boxes`` where chunks of ``lengths`` along ``dim`` meet.

    Returns, for every chunk, its pieces as (box, start, length) with ``start`` counted along
    ``dim`` of the box; pieces of one chunk are in storage order of the boxes.
    """
    pieces, begin = [], 0
    for length in lengths:
        end, mine = begin + length, []
        for box in boxes:
            first = max(begin, box.offset[dim])
            last = min(end, box.offset[dim] + box.shape[dim])
            if first < last:
                mine.append((box, first - box.offset[dim], last - first))
        pieces.append(mine)
        begin = end
    return pieces


def chunk_numels(length: int, world_size: int, row_numel: int = 1) -> tuple[int, ...]:
    """Return every rank's number of elements under torch's ``Shard`` of a dim of ``length``.

    ``torch.chunk`` semantics: equal chunks, rounded up; the last ones may be short or empty.
    ``row_numel`` is the number of elements behind one index of the dim.
    """
    return expand(chunk_runs(length, world_size, row_numel))


def chunk_runs(length: int, world_size: int, row_numel: int = 1) -> Runs:
    """Return ``chunk_numels`` run-length encoded, at most three runs."""
    step = max(1, -(-length // world_size))
    full, rest = divmod(length, step)
    short = int(rest > 0)
    runs = ((step, full), (rest, short), (0, world_size - full - short))
    return canonical((count * row_numel, ranks) for count, ranks in runs)


def chunk_lengths(length: int, world_size: int) -> set[int]:
    """Return the lengths that occur among ``chunk_numels(length, world_size)``: at most three."""
    return {chunk for chunk, _ in chunk_runs(length, world_size)}


def sharded_block(shape: Shape, cuts: Sequence[tuple[int, int, int]]) -> tuple[Shape, Shape]:
    """Return (shape, offset) of the block that ``cuts`` leave of a tensor of ``shape``.

    Each cut is (dim, number of ranks, rank), one per mesh axis with torch's ``Shard``, in the
    order of the axes; a later cut divides what an earlier one has left.
    """
    block, offset = list(shape), [0] * len(shape)
    for dim, world_size, rank in cuts:
        step = -(-block[dim] // world_size)
        start = min(block[dim], rank * step)
        offset[dim] += start
        block[dim] = min(block[dim], start + step) - start
    return tuple(block), tuple(offset)


def contiguous_stride(shape: Sequence[int]) -> Shape:
    """Return the row-major strides of ``shape``."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
