# SPDX-License-Identifier: Apache-2.0
"""RaggedShard: cut a tensor's memory into contiguous ranges of any proportion."""

import inspect
import math
import operator
import sys
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor, Placement

from vescale.dtensor.runs import Runs, canonical, encode, expand, length, locate, text, total

_TORCH_REDISTRIBUTE = inspect.unwrap(DTensor.redistribute).__code__


class RaggedShard(Placement):
    """Divide a tensor's row-major memory over one mesh axis, in proportion to ``local_units``.

    ``dims`` is a prefix ``(0, ..., k-1)`` of the tensor's dims; their indices, flattened, are the
    rows, and no row (``prod(shape[k:])`` elements) is ever cut. Rank ``i`` of the axis holds
    ``local_units[i] / sum(local_units)`` of all rows, in order; a zero unit is an empty local
    tensor. ``dims=()`` keeps the tensor whole on the one rank with a non-zero unit.

    The cut is always the last one: on a mesh of several axes the other placements are applied
    first, and what they leave on this rank is divided.

    A value object: equal and hashed by ``(dims, local_units)``. It keeps the units run-length
    encoded, so it is as small on 10,000 ranks as on 8: ``runs`` are pairs ``(units, ranks)``, and
    ``from_runs`` takes them. ``axis_size`` is the number of ranks.

    Raises ValueError when ``dims`` is not a prefix, a unit is negative, all are zero, or
    ``dims=()`` has several owners.
    """

    def __init__(self, dims: Iterable[int], local_units: Iterable[int]) -> None:
        super().__init__()  # the base is C++: is_shard() on an uninitialised one is a crash
        try:
            dims, units = tuple(map(operator.index, dims)), tuple(local_units)
            if type(sum(units)) is not int:  # asking the sum, not each of perhaps 10,000 units
                units = tuple(map(operator.index, units))
        except TypeError as error:
            raise TypeError(
                f"RaggedShard got dims={dims!r} and local_units={local_units!r}, but both are "
                "sequences of ints, with one unit count per rank, as in RaggedShard((0,), (1, 3))."
            ) from error
        self._set(dims, encode(units))

    @staticmethod
    def from_runs(dims: Iterable[int], runs: Iterable[tuple[int, int]]) -> "RaggedShard":
        """Return the placement whose ``local_units`` are ``units`` for the next ``ranks`` ranks.

        ``runs`` are such pairs ``(units, ranks)`` of ints in rank order. The cost does not depend
        on the number of ranks. Raises like the constructor, and ValueError for a negative number
        of ranks.
        """
        try:
            dims = tuple(map(operator.index, dims))
            runs = tuple((operator.index(units), operator.index(ranks)) for units, ranks in runs)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"RaggedShard.from_runs got dims={dims!r} and runs={runs!r}, but runs are pairs of "
                "ints (units, ranks), as in ((1, 8), (0, 56)) for 64 ranks."
            ) from error
        if any(ranks < 0 for _, ranks in runs):
            raise ValueError(
                f"RaggedShard.from_runs got runs={runs}, but a run (units, ranks) has no negative "
                "number of ranks; give pairs as in ((1, 8), (0, 56)) for 64 ranks."
            )
        placement = RaggedShard.__new__(RaggedShard)
        Placement.__init__(placement)
        placement._set(dims, canonical(runs))
        return placement

    def _set(self, dims: tuple[int, ...], runs: Runs) -> None:
        if dims != tuple(range(len(dims))):
            raise ValueError(
                f"RaggedShard got dims={dims}, but they must be a prefix (0, ..., k-1) of the "
                "tensor's dims; permute the tensor so that the dims to cut come first."
            )
        units = total(runs)
        if units <= 0 or min(runs)[0] < 0:
            raise ValueError(
                f"RaggedShard got local_units={text(runs)}, but they must be non-negative with a "
                "positive sum; give one unit count per rank of the mesh axis."
            )
        owners = [(run, ranks) for run, (value, ranks) in enumerate(runs) if value]
        single_owner = len(owners) == 1 and owners[0][1] == 1
        if not dims and not single_owner:
            raise ValueError(
                f"RaggedShard got dims=() with local_units={text(runs)}, but a tensor that is kept "
                "whole has one owner; make exactly one unit non-zero, or give dims to cut."
            )
        self.dims, self.runs, self.axis_size = dims, runs, length(runs)
        self._total = units
        self._hash = hash((type(self).__name__, dims, runs))
        self._owner = length(runs[: owners[0][0]]) if single_owner else None

    @property
    def local_units(self) -> tuple[int, ...]:
        """One unit count per rank: ``[axis_size]``; made of ``runs`` when it is asked for."""
        return expand(self.runs)

    @property
    def owner(self) -> int | None:
        """The only rank with a non-zero unit, or None when there are several."""
        return self._owner

    def unit_numel(self, shape: Sequence[int]) -> int:
        """Return the elements of one unit of a tensor, or of a block of it, of ``shape``.

        Raises ValueError when the rows of ``shape`` are not a multiple of the units. A single
        owner holds everything, whatever its number of units, so ``split`` never asks.
        """
        k = len(self.dims)
        rows = math.prod(shape[:k])
        if rows % self._total:
            raise ValueError(
                f"{self} has {self._total} units in total, but shape {tuple(shape)} has {rows} "
                f"rows over dims {self.dims}, which is not a multiple; choose units whose sum "
                "divides the rows, or cut more dims."
            )
        return rows // self._total * math.prod(shape[k:])

    def split(self, shape: Sequence[int], rank: int) -> tuple[int, int]:
        """Return the flat range ``[start, end)``, in elements, of ``rank`` in ``shape``."""
        self._check_ndim(shape)
        if not 0 <= rank < self.axis_size:
            raise ValueError(
                f"{self} has units for {self.axis_size} ranks, so there is no rank {rank}; "
                "give the rank on the mesh axis that it cuts over, counted from 0."
            )
        if self._owner is not None:
            numel = math.prod(shape)
            return (0 if rank <= self._owner else numel), (0 if rank < self._owner else numel)
        unit = self.unit_numel(shape)
        before, units = locate(self.runs, rank)
        return before * unit, (before + units) * unit

    def split_numels(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return every rank's number of elements of a tensor, or of a block, of ``shape``."""
        return expand(self.split_runs(shape))

    def split_runs(self, shape: Sequence[int]) -> Runs:
        """Return ``split_numels`` run-length encoded, as pairs ``(numel, ranks)``.

        Equal for equal numbers, whatever the units.
        """
        self._check_ndim(shape)
        if self._owner is not None:
            numel = math.prod(shape)
            return canonical((numel if units else 0, ranks) for units, ranks in self.runs)
        unit = self.unit_numel(shape)
        return canonical((units * unit, ranks) for units, ranks in self.runs)

    def reconstruct_tensor_from_flat(
        self, flat_tensor: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        """Return ``flat_tensor``, whole rows of a tensor of ``shape``, as ``[rows, *shape[k:]]``.

        A view. Upstream's name; a DTensor has ``local_block()``. Raises ValueError when it is
        not flat, or cuts a row.
        """
        row_shape = tuple(shape[len(self.dims) :])
        row_numel = math.prod(row_shape)
        if flat_tensor.ndim != 1 or flat_tensor.numel() % max(row_numel, 1):
            raise ValueError(
                f"{self} got a tensor of shape {tuple(flat_tensor.shape)} for rows of "
                f"{row_shape}; pass one flat tensor of whole rows, {row_numel} elements each."
            )
        return flat_tensor.view(flat_tensor.numel() // row_numel if row_numel else 0, *row_shape)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return False.

        torch's own ``DTensor.redistribute`` asks this of every placement that it is to move to, and
        would then leave the data as they are: to it alone this raises NotImplementedError.
        """
        if sys._getframe(1).f_code is _TORCH_REDISTRIBUTE:
            raise NotImplementedError(
                f"torch's own DTensor cannot be moved to {self}: use "
                "vescale.dtensor.redistribute_many([x], placements), or "
                "vescale.dtensor.tensor.adopt(x).redistribute(placements=placements)."
            )
        return False

    def _check_ndim(self, shape: Sequence[int]) -> None:
        if len(self.dims) > len(shape):
            raise ValueError(
                f"{self} cuts dims {self.dims}, but the tensor has shape {tuple(shape)}; "
                f"give at most {len(shape)} dims."
            )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            type(other) is type(self)
            and self._hash == other._hash
            and self.dims == other.dims
            and self.runs == other.runs
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={text(self.runs)})"

    __str__ = __repr__

    def __reduce__(self) -> tuple:  # the default would skip __init__, and with it the C++ base
        return rebuild_ragged_shard, (self.dims, self.runs)

    def __copy__(self) -> "RaggedShard":
        return self

    def __deepcopy__(self, memo: dict) -> "RaggedShard":
        return self


def rebuild_ragged_shard(dims: tuple[int, ...], runs: Runs) -> RaggedShard:
    """Return what was pickled; a function, as ``torch.load(weights_only=True)`` wants it."""
    return RaggedShard.from_runs(dims, runs)


class _StridedRaggedShard(RaggedShard):
    """Upstream's name for a ragged cut after a ``Shard(0)`` on a later mesh axis.

    Here the ragged cut is always the last one, so the layout is that of ``RaggedShard``, and
    ``split_factor`` (the size of the later axis) is kept only to be read back.
    """

    def __init__(self, dims: Iterable[int], local_units: Iterable[int], split_factor: int) -> None:
        super().__init__(dims, local_units)
        if not isinstance(split_factor, int):
            raise TypeError(
                f"_StridedRaggedShard got split_factor={split_factor!r}, but it is an int, the "
                "size of the later mesh axis; or use RaggedShard, whose layout is the same."
            )
        self.split_factor = split_factor

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.split_factor == other.split_factor  # type: ignore[attr-defined]  # equal types

    __hash__ = RaggedShard.__hash__

    def __repr__(self) -> str:
        return (
            f"_StridedRaggedShard(dims={self.dims}, local_units={text(self.runs)}, "
            f"split_factor={self.split_factor})"
        )

    __str__ = __repr__

    def __reduce__(self) -> tuple:
        return type(self), (self.dims, self.local_units, self.split_factor)


def is_ragged_shard(placement: Placement) -> bool:
    """Tell whether ``placement`` is a RaggedShard."""
    return isinstance(placement, RaggedShard)
