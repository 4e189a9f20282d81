# SPDX-License-Identifier: Apache-2.0
"""The placements by their old names and constructors; the objects are torch's own.

``Shard`` and ``Replicate`` are torch's classes. ``Partial`` and ``InterleavedShard`` are fronts:
calling one makes a placement of torch, and ``isinstance`` knows those that torch makes itself.
"""

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
import torch.distributed.tensor as stock
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale.legacy._errors import LegacyValueError
from vescale.legacy._torch_compat import DTensorSpec, TensorMeta, _StridedShard

__all__ = [
    "DTensorSpec",
    "InterleavedShard",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "TensorMeta",
    "interleaved_size",
    "is_interleaved_shard",
    "is_sharded",
    "serialize_from_tensor",
    "serialize_to_tensor",
    "shard_dim",
    "short_name",
]

# c10d's object for each name is made by pybind, equal by value and not hashable: hence pairs.
_OPS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "product"),
)


if TYPE_CHECKING:  # what calling the classes below returns
    _PartialBase = stock.Partial
    _InterleavedBase = _StridedShard
else:
    _PartialBase = _InterleavedBase = object


class _PartialFront(type):
    def __call__(cls, reduce_op: Any = "sum") -> stock.Partial:
        for op, name in _OPS:
            if reduce_op == name or (not isinstance(reduce_op, str) and reduce_op == op):
                return stock.Partial(name)
        raise LegacyValueError(
            f"Partial({reduce_op!r}): expected one of {[name for _, name in _OPS]} or the "
            "ReduceOp of that name."
        )

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, stock.Partial)


class Partial(_PartialBase, metaclass=_PartialFront):
    """``Partial(reduce_op=ReduceOp.SUM)``: each rank holds a term of the value.

    Takes a ``torch.distributed.ReduceOp`` or its lower-case name; returns torch's ``Partial``,
    whose ``reduce_op`` is the name.
    """

    if TYPE_CHECKING:

        def __init__(self, reduce_op: Any = "sum") -> None: ...


class _InterleavedFront(type):
    def __call__(cls, dim: int, interleaved_size: int) -> _StridedShard:
        if not isinstance(interleaved_size, int) or interleaved_size < 1:
            raise LegacyValueError(
                f"InterleavedShard({dim}, {interleaved_size!r}): expected a positive int, the "
                "number of pieces that are each cut among the ranks."
            )
        return _StridedShard(dim, split_factor=interleaved_size)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _StridedShard)


class InterleavedShard(_InterleavedBase, metaclass=_InterleavedFront):
    """``InterleavedShard(dim, interleaved_size)``: cut ``dim`` into pieces, and each among ranks.

    Returns torch's placement of this layout. Ask ``interleaved_size(p)`` for the number of
    pieces. It never equals ``Shard(dim)``, and is no instance of ``Shard``.
    """

    if TYPE_CHECKING:

        def __init__(self, dim: int, interleaved_size: int) -> None: ...


def is_interleaved_shard(
    placement: Placement, dim: int | None = None, interleaved_size: int | None = None
) -> TypeGuard[_StridedShard]:
    """Tell whether ``placement`` is interleaved, on ``dim`` and in this many pieces if given."""
    return (
        isinstance(placement, _StridedShard)
        and dim in (None, placement.dim)
        and interleaved_size in (None, placement.split_factor)
    )


def interleaved_size(placement: Placement) -> int:
    """Return into how many pieces ``placement`` cuts its dim first; 1 for ``Shard``."""
    if isinstance(placement, _StridedShard):
        return int(placement.split_factor)
    if isinstance(placement, Shard):
        return 1
    raise LegacyValueError(f"{placement} cuts no dim; expected a Shard or InterleavedShard.")


def is_sharded(placement: Placement, dim: int | None = None) -> TypeGuard[Shard | _StridedShard]:
    """Tell whether ``placement`` is ``Shard`` or ``InterleavedShard``, on ``dim`` if given."""
    return isinstance(placement, Shard | _StridedShard) and dim in (None, placement.dim)


def shard_dim(placement: Placement) -> int | None:
    """Return the tensor dim that ``placement`` cuts, or None."""
    return placement.dim if is_sharded(placement) else None


def short_name(placement: Placement) -> str:
    """Return the old short form: ``S(0)``, ``R``, ``P`` or ``IS(0,2)``."""
    if isinstance(placement, _StridedShard):
        return f"IS({placement.dim},{interleaved_size(placement)})"
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "R" if placement.is_replicate() else "P" if placement.is_partial() else str(placement)


def serialize_to_tensor(placement: Placement, device: Any = "cpu") -> torch.Tensor:
    """Return int64[3] that stands for ``placement``; a partial one must be a sum."""
    if placement.is_replicate():
        code = (0, 0, 0)
    elif placement == stock.Partial("sum"):
        code = (1, 0, 0)
    elif isinstance(placement, _StridedShard):
        code = (3, placement.dim, interleaved_size(placement))
    elif isinstance(placement, Shard):
        code = (2, placement.dim, 0)
    else:
        raise LegacyValueError(
            f"{placement} has no code; expected Replicate, Partial('sum'), Shard or "
            "InterleavedShard."
        )
    return torch.tensor(code, dtype=torch.int64, device=device)


def serialize_from_tensor(code: torch.Tensor) -> Placement:
    """Return the placement that ``serialize_to_tensor`` made int64[3] ``code`` of."""
    kind, dim, pieces = code.tolist()
    if kind not in (0, 1, 2, 3):
        raise LegacyValueError(f"{code} is no code of a placement; its first value is 0 to 3.")
    if kind == 3:
        return InterleavedShard(dim, pieces)
    return Shard(dim) if kind == 2 else Partial() if kind == 1 else Replicate()
