# SPDX-License-Identifier: Apache-2.0
"""``InterleavedShard``: its element order, and ``split`` and ``cat`` that move no data.

IS(d, k) on n ranks views dim d as [k, n, m]: rank r has [k, m] at place r, one piece after the
other. Seen as [n, k, m] that is an ordinary even shard of dim d of a permuted tensor; so every
change of layout here is one of torch's for ``Shard``, and a local reordering.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from vescale.legacy._errors import LegacyValueError
from vescale.legacy.dtensor.placement_types import (
    InterleavedShard,
    Placement,
    Shard,
    interleaved_size,
    is_interleaved_shard,
    is_sharded,
)

__all__ = ["InterleavedOps", "cat", "split"]


def gather_order(whole: torch.Tensor, dim: int, pieces: int, ranks: int) -> torch.Tensor:
    """Return ``whole``, of parts one after the other on ``dim``, in the order of the tensor."""
    return _swapped(whole, dim, ranks, pieces)


def cut_order(whole: torch.Tensor, dim: int, pieces: int, ranks: int) -> torch.Tensor:
    """Return ``whole`` so reordered that equal cuts of ``dim`` are the interleaved parts."""
    return _swapped(whole, dim, pieces, ranks)


def with_local(x: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor laid out as ``x``, of the part ``local``. Differentiable."""
    return _part(local, x, x.placements, x.shape)


def relabel(x: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Return the same parts under ``placements``: of the whole in another order of elements.

    Differentiable. Meant for changing ``InterleavedShard`` into ``Shard`` and back.
    """
    if tuple(placements) == x.placements:
        return x
    return _part(x.to_local(), x, placements, x.shape)


def split(x: DTensor, split_size: int | Sequence[int], dim: int = 0) -> list[DTensor]:
    """Return ``torch.split`` of ``x``, interleaved on ``dim``, without communication.

    IS(d, k) gives parts under S(d) when each is one of the k pieces, and under IS(d, j) when
    each is j of them. Differentiable. ``ValueError`` where ``x`` is not interleaved on ``dim``
    on exactly one mesh dim and whole on others, or where a cut falls inside a piece.
    """
    dim %= x.ndim
    axis = _only_axis(x, dim)
    pieces = interleaved_size(x.placements[axis])
    piece = x.size(dim) // pieces
    if isinstance(split_size, int):
        whole, rest = divmod(x.size(dim), max(split_size, 1))
        sizes = [split_size] * whole + ([rest] if rest else [])
    else:
        sizes = list(split_size)
    if sum(sizes) != x.size(dim) or any(size % piece or size < 1 for size in sizes):
        raise LegacyValueError(
            f"split of {tuple(x.shape)} on dim {dim} into {sizes}, under {x.placements}: a part "
            f"must be a multiple of the piece, {piece}; redistribute to Replicate first."
        )
    ranks = x.device_mesh.size(axis)
    out = []
    for local in x.to_local().split([size // ranks for size in sizes], dim):
        size, place = local.size(dim) * ranks, [*x.placements]
        place[axis] = _shard(dim, size // piece)
        shape = torch.Size((*x.shape[:dim], size, *x.shape[dim + 1 :]))
        out.append(_part(local, x, place, shape))
    return out


def cat(tensors: Sequence[DTensor], dim: int = 0) -> DTensor:
    """Return ``torch.cat`` of tensors cut alike on ``dim``, without communication.

    S(d) counts as IS(d, 1): parts under IS(d, j) and IS(d, k) with pieces of one size give
    IS(d, j + k). Differentiable. ``ValueError`` where layouts or sizes of pieces differ.
    """
    if problem := _why_not_cat(tensors, dim):
        raise LegacyValueError(
            f"cat on dim {dim} of {[(tuple(x.shape), x.placements) for x in tensors]}: {problem}; "
            "redistribute to Replicate first."
        )
    first = tensors[0]
    dim %= first.ndim
    axis = _only_axis(first, dim)
    pieces = [interleaved_size(x.placements[axis]) for x in tensors]
    placements = [*first.placements]
    placements[axis] = _shard(dim, sum(pieces))
    total = sum(x.size(dim) for x in tensors)
    shape = torch.Size((*first.shape[:dim], total, *first.shape[dim + 1 :]))
    return _part(torch.cat([x.to_local() for x in tensors], dim), first, placements, shape)


def _why_not_cat(tensors: Sequence[DTensor], dim: int) -> str | None:
    """Say what is in the way of ``cat`` without communication, or return None."""
    first = tensors[0]
    dim %= first.ndim
    for x in tensors:
        if sum(is_sharded(placement, dim) for placement in x.placements) != 1:
            return "each must be cut on that dim by exactly one mesh dim"
    axis = _only_axis(first, dim)
    others = [x.placements[:axis] + x.placements[axis + 1 :] for x in tensors]
    if any(x.device_mesh != first.device_mesh for x in tensors) or len(set(others)) > 1:
        return "meshes and placements must be the same but for the pieces of that dim"
    step = first.size(dim) // interleaved_size(first.placements[axis])
    if step % first.device_mesh.size(axis) or any(
        x.size(dim) != step * interleaved_size(x.placements[axis]) for x in tensors
    ):
        return "pieces must be of one size, which the ranks divide"
    return None


class InterleavedOps(TorchFunctionMode):
    """While open, ``torch.split``, ``chunk`` and ``cat`` use the functions of this file.

    They do where the dim acted on is interleaved (or, for ``cat``, cut evenly) and the pieces
    fit; every other call goes to torch.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        found = None if rule is None else rule(*args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _split(
    tensor: Any, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None
) -> Any:
    sizes = split_size if split_size_or_sections is None else split_size_or_sections
    if not _interleaved_on(tensor, dim):
        return None
    pieces = interleaved_size(tensor.placements[_only_axis(tensor, dim)])
    piece = tensor.size(dim) // pieces
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    if any(size % piece or size < 1 for size in listed):
        return None
    return tuple(split(tensor, sizes, dim))


def _chunk(input: Any, chunks: int, dim: int = 0) -> Any:
    if not isinstance(input, DTensor) or chunks < 1:
        return None
    return _split(input, -(-input.size(dim) // chunks), dim)


def _cat(tensors: Any, dim: int = 0, *, axis: int | None = None, out: Any = None) -> Any:
    dim = dim if axis is None else axis
    if out is not None or not all(isinstance(x, DTensor) and x.ndim for x in tensors):
        return None
    return None if _why_not_cat(tensors, dim) else cat(tensors, dim)


_RULES: dict[Any, Callable] = {
    torch.split: _split,
    torch.Tensor.split: _split,
    torch.chunk: _chunk,
    torch.Tensor.chunk: _chunk,
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
}


def _interleaved_on(x: object, dim: int) -> bool:
    if not isinstance(x, DTensor):
        return False
    dim %= x.ndim
    cut = [p for p in x.placements if is_sharded(p, dim)]
    return len(cut) == 1 and is_interleaved_shard(cut[0])


def _only_axis(x: DTensor, dim: int) -> int:
    axes = [axis for axis, placement in enumerate(x.placements) if is_sharded(placement, dim)]
    if len(axes) != 1:
        raise LegacyValueError(
            f"dim {dim} of {tuple(x.shape)} is cut by {len(axes)} mesh dims under "
            f"{x.placements}; expected exactly one."
        )
    return axes[0]


def _shard(dim: int, pieces: int) -> Placement:
    return Shard(dim) if pieces == 1 else InterleavedShard(dim, pieces)


def _part(local: torch.Tensor, like: DTensor, placements: Any, shape: torch.Size) -> DTensor:
    return DTensor.from_local(
        local,
        like.device_mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=_contiguous(shape),
    )


def _swapped(whole: torch.Tensor, dim: int, first: int, second: int) -> torch.Tensor:
    parts = whole.unflatten(dim, (first, second, whole.size(dim) // (first * second)))
    return parts.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
