# SPDX-License-Identifier: Apache-2.0
"""RaggedShard: cut a tensor's memory into contiguous ranges of any proportion."""

import math
import operator
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import Placement


class RaggedShard(Placement):
    """Divide a tensor's row-major memory over one mesh axis, in proportion to ``local_units``.

    ``dims`` is a prefix ``(0, ..., k-1)`` of the tensor's dims; their indices, flattened, are the
    rows, and no row (``prod(shape[k:])`` elements) is ever cut. Rank ``i`` of the axis holds
    ``local_units[i] / sum(local_units)`` of all rows, in order; a zero unit is an empty local
    tensor. ``dims=()`` keeps the tensor whole on the one rank with a non-zero unit.

    The cut is always the last one: on a mesh of several axes the other placements are applied
    first, and what they leave on this rank is divided.

    A value object: equal and hashed by ``(dims, local_units)``.

    Raises ValueError when ``dims`` is not a prefix, a unit is negative, all are zero, or
    ``dims=()`` has several owners.
    """

    def __init__(self, dims: Iterable[int], local_units: Iterable[int]) -> None:
        super().__init__()  # the base is C++: is_shard() on an uninitialised one is a crash
        try:
            dims, units = tuple(map(operator.index, dims)), tuple(local_units)
            total = sum(units)
            if type(total) is not int:  # asking the sum, not each of perhaps 10,000 units
                units = tuple(map(operator.index, units))
                total = sum(units)
        except TypeError as error:
            raise TypeError(
                f"RaggedShard got dims={dims!r} and local_units={local_units!r}, but both are "
                "sequences of ints, with one unit count per rank, as in RaggedShard((0,), (1, 3))."
            ) from error
        if dims != tuple(range(len(dims))):
            raise ValueError(
                f"RaggedShard got dims={dims}, but they must be a prefix (0, ..., k-1) of the "
                "tensor's dims; permute the tensor so that the dims to cut come first."
            )
        if total <= 0 or min(units) < 0:
            raise ValueError(
                f"RaggedShard got local_units={units}, but they must be non-negative with a "
                "positive sum; give one unit count per rank of the mesh axis."
            )
        single_owner = len(units) - units.count(0) == 1
        if not dims and not single_owner:
            raise ValueError(
                f"RaggedShard got dims=() with local_units={units}, but a tensor that is kept "
                "whole has one owner; make exactly one unit non-zero, or give dims to cut."
            )
        self.dims, self.local_units = dims, units
        self._total = total
        self._hash = hash((type(self).__name__, dims, units))  # once: there may be 10,000 units
        self._owner = units.index(total) if single_owner else None

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
        if not 0 <= rank < len(self.local_units):
            raise ValueError(
                f"{self} has units for {len(self.local_units)} ranks, so there is no rank {rank}; "
                "give the rank on the mesh axis that it cuts over, counted from 0."
            )
        if self._owner is not None:
            numel = math.prod(shape)
            return (0 if rank <= self._owner else numel), (0 if rank < self._owner else numel)
        unit = self.unit_numel(shape)
        start = sum(self.local_units[:rank]) * unit
        return start, start + self.local_units[rank] * unit

    def split_numels(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return every rank's number of elements of a tensor, or of a block, of ``shape``."""
        self._check_ndim(shape)
        if self._owner is not None:
            numel = math.prod(shape)
            return tuple(
                numel if rank == self._owner else 0 for rank in range(len(self.local_units))
            )
        unit = self.unit_numel(shape)
        return tuple(units * unit for units in self.local_units)

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
            and self.local_units == other.local_units
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"

    __str__ = __repr__

    def __reduce__(self):  # the default would skip __init__, and with it the C++ base
        return type(self), (self.dims, self.local_units)

    def __copy__(self) -> "RaggedShard":
        return self

    def __deepcopy__(self, memo: dict) -> "RaggedShard":
        return self


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
        return super().__eq__(other) and self.split_factor == other.split_factor

    __hash__ = RaggedShard.__hash__

    def __repr__(self) -> str:
        return (
            f"_StridedRaggedShard(dims={self.dims}, local_units={self.local_units}, "
            f"split_factor={self.split_factor})"
        )

    __str__ = __repr__

    def __reduce__(self):
        return type(self), (self.dims, self.local_units, self.split_factor)


def is_ragged_shard(placement: Placement) -> bool:
    """Tell whether ``placement`` is a RaggedShard."""
    return isinstance(placement, RaggedShard)
