# SPDX-License-Identifier: Apache-2.0
"""Which elements of a whole tensor a rank holds, as runs of its flat memory.

Every number is in elements. Pure arithmetic: no communication, no tensor values.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale.dtensor._torch_compat import DTensorSpec, _StridedShard, strided_shard_indices
from vescale.dtensor.layout import boxes_of_range
from vescale.dtensor.placement import RaggedShard
from vescale.dtensor.spec import ragged_axis

Segment = tuple[int, int]  # (start, length)


@dataclass(frozen=True, eq=False)
class Strip:
    """The same columns of some rows of a flat tensor, in ascending order.

    ``rows`` are indices [count] of rows of ``row_numel`` elements, ``columns`` segments of a row.
    The elements follow each other from ``start`` in the rank's part.
    """

    rows: np.ndarray
    row_numel: int
    columns: tuple[Segment, ...]
    start: int

    @property
    def width(self) -> int:
        """How many elements of a row the strip has."""
        return sum(length for _, length in self.columns)

    @property
    def numel(self) -> int:
        return len(self.rows) * self.width

    @property
    def first(self) -> int:
        """Where the first element lies in the whole tensor."""
        return int(self.rows[0]) * self.row_numel + self.columns[0][0]

    @property
    def end(self) -> int:
        """Where the tensor goes on after the last element."""
        return int(self.rows[-1]) * self.row_numel + sum(self.columns[-1])

    def segments(self) -> Iterator[Segment]:
        for row in self.rows.tolist():
            for start, length in self.columns:
                yield row * self.row_numel + start, length


def strips_of(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int] | None,
    order: Sequence[int] | None = None,
) -> list[Strip]:
    """Return what the rank at ``coordinate`` of the mesh holds, ascending; nothing for None.

    ``order`` lists the dims from the slowest to the fastest in memory, if that is not row-major;
    the rank's part is then in that order too. Raises NotImplementedError for Partial and for
    placements of others.
    """
    if coordinate is None or math.prod(shape) == 0:
        return []
    order = range(len(shape)) if order is None else order
    indices = _indices(shape, placements, mesh_shape, coordinate)
    axis = ragged_axis(placements)
    if axis is None:
        memory = tuple(shape[dim] for dim in order)
        return _strips([indices[dim] for dim in order], memory, 0)
    base = tuple(len(index) for index in indices)
    start, end = placements[axis].split(base, coordinate[axis])  # type: ignore[attr-defined]  # ragged
    return [
        strip
        for box in boxes_of_range(start, end, base)
        for strip in _strips(
            [
                index[offset : offset + length]
                for index, offset, length in zip(indices, box.offset, box.shape, strict=True)
            ],
            tuple(shape),
            box.start,
        )
    ]


def strips_inside(
    whole: Sequence[int],
    place: tuple[int, int],
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int] | None,
    order: Sequence[int],
) -> list[Strip]:
    """Return what a rank holds of a tensor of ``shape`` that is itself a part of ``whole``.

    ``place`` is (dim, start): where the part begins in ``whole``, which is longer there only. The
    rest as in ``strips_of``; ragged placements are refused too.
    """
    if coordinate is None or math.prod(shape) == 0:
        return []
    if ragged_axis(placements) is not None:
        raise NotImplementedError(
            f"a random operator on a tensor of {tuple(placements)} inside random.scope(): ragged "
            "tensors are parameters, no part of a batch; leave the scope to fill them."
        )
    indices = _indices(shape, placements, mesh_shape, coordinate)
    dim, start = place
    index = indices[dim]
    if isinstance(index, range):
        indices[dim] = range(start + index.start, start + index.start + len(index))
    else:
        indices[dim] = start + index
    return _strips([indices[dim] for dim in order], [whole[dim] for dim in order], 0)


def segments_of(spec: DTensorSpec, coordinate: Sequence[int] | None) -> list[Segment]:
    """Return the runs of the row-major tensor of ``spec`` that a rank holds, in storage order."""
    shape = tuple(spec.tensor_meta.shape)
    merged: list[Segment] = []
    for strip in strips_of(shape, spec.placements, spec.mesh.shape, coordinate):
        for start, length in strip.segments():
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
    return merged


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Return the dims from the slowest to the fastest, or None where row-major is right.

    torch's fills run through the memory of a tensor, whatever the order of its dims. Raises
    NotImplementedError where elements share memory.
    """
    wide = [dim for dim in range(len(shape)) if shape[dim] > 1]
    by_stride = sorted(wide, key=lambda dim: -stride[dim])
    for slow, fast in itertools.pairwise(by_stride):
        if stride[slow] < stride[fast] * shape[fast]:
            break
    else:
        if not by_stride or stride[by_stride[-1]] > 0:
            if by_stride == wide:
                return None
            return [dim for dim in range(len(shape)) if shape[dim] <= 1] + by_stride
    raise NotImplementedError(
        f"a random fill of a tensor of shape {tuple(shape)} and strides {tuple(stride)}, some of "
        "whose elements share memory; call contiguous() first."
    )


def _indices(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> list[np.ndarray | range]:
    """Return, for every dim, the indices that remain before a ragged cut, ascending."""
    indices: list[np.ndarray | range] = [range(length) for length in shape]
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            index = indices[placement.dim]
            step = -(-len(index) // mesh_shape[axis])
            start = coordinate[axis] * step
            indices[placement.dim] = index[start : start + step]
        elif type(placement) is _StridedShard:
            index = np.asarray(indices[placement.dim])
            kept = strided_shard_indices(placement, len(index), mesh_shape[axis], coordinate[axis])
            indices[placement.dim] = index[kept]
        elif not isinstance(placement, Replicate | RaggedShard):
            raise NotImplementedError(
                f"random values of a tensor of {tuple(placements)} are not defined, as its values "
                "are sums that nobody formed yet, or its placement is unknown; redistribute it to "
                "Shard, Replicate or RaggedShard first."
            )
    return indices


def _strips(indices: Sequence[np.ndarray | range], shape: Sequence[int], start: int) -> list[Strip]:
    """Return a block, all combinations of ``indices``, as at most one strip."""
    if any(len(index) == 0 for index in indices):
        return []
    cut = [dim for dim, index in enumerate(indices) if len(index) < shape[dim]]
    last = cut[-1] if cut else 0
    inner = math.prod(shape[last + 1 :])
    row_numel = math.prod(shape[last:])
    rows = np.zeros(1, np.int64)
    for index, length in zip(indices[:last], shape[:last], strict=True):
        rows = (rows[:, None] * length + np.asarray(index, np.int64)).reshape(-1)
    columns = ((0, 1),) if not shape else _runs(indices[last], inner)
    return [Strip(rows, row_numel, columns, start)]


def _runs(index: np.ndarray | range, inner: int) -> tuple[Segment, ...]:
    if isinstance(index, range):
        return ((index.start * inner, len(index) * inner),)
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    firsts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(index)]
    return tuple(
        (int(index[first]) * inner, (end - first) * inner)
        for first, end in zip(firsts, ends, strict=True)
    )
