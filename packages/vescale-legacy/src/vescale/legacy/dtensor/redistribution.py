# SPDX-License-Identifier: Apache-2.0
"""``redistribute_dtensor`` and the three collectives that are spelled out."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from vescale.legacy._errors import LegacyValueError
from vescale.legacy.dtensor import interleaved
from vescale.legacy.dtensor._utils import check_interleaved
from vescale.legacy.dtensor.conversion import keep_on_first
from vescale.legacy.dtensor.normalize import normalize_placements
from vescale.legacy.dtensor.placement_types import (
    Placement,
    Replicate,
    Shard,
    interleaved_size,
    is_interleaved_shard,
    is_sharded,
    shard_dim,
)

__all__ = [
    "redistribute_dtensor",
    "vescale_all_gather",
    "vescale_all_reduce",
    "vescale_reduce_scatter",
]


def redistribute_dtensor(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    async_op: bool = True,
) -> DTensor:
    """Return ``dtensor`` under other placements; the same data where they are the same.

    Every change is legal. To ``Partial``: gathered, then kept on coordinate 0 and zero on the
    others. From or to ``InterleavedShard``: by way of ``Replicate``. With ``async_op`` the data
    may come later; whatever uses it waits.

    Differentiable: the gradient goes back to the old placements, ``Replicate`` for ``Partial``.
    ``RuntimeError`` without placements. ``ValueError``: another mesh, or what
    ``normalize_placements`` refuses.
    """
    mesh = device_mesh or dtensor.device_mesh
    if placements is None:
        raise RuntimeError("placements is needed for redistribute_dtensor, one per mesh dim.")
    if mesh != dtensor.device_mesh:
        raise LegacyValueError(
            f"cannot move a DTensor on {dtensor.device_mesh} to a different device mesh, {mesh}."
        )
    placements = normalize_placements(placements, mesh.ndim, tensor_ndim=dtensor.ndim)
    if placements == dtensor.placements:
        return dtensor
    return _change(dtensor, placements, async_op)


def vescale_all_gather(
    d_tensor: DTensor,
    mesh_dims: int | str | Sequence[int | str] | None = None,
    async_op: bool = True,
) -> DTensor:
    """Return ``d_tensor`` replicated on the mesh dims named, by default all that cut it.

    ``ValueError`` where a named mesh dim does not cut it.
    """
    cuts = [axis for axis, placement in enumerate(d_tensor.placements) if is_sharded(placement)]
    axes = cuts if mesh_dims is None else _axes(d_tensor, mesh_dims)
    _require(d_tensor, axes, cuts, "sharded")
    return _with(d_tensor, dict.fromkeys(axes, Replicate()), async_op)


def vescale_all_reduce(
    d_tensor: DTensor,
    mesh_dims: int | str | Sequence[int | str] | None = None,
    async_op: bool = True,
) -> DTensor:
    """Return ``d_tensor`` reduced on the mesh dims named, by default all where it is partial.

    ``ValueError`` where it is not partial on one of them.
    """
    sums = [axis for axis, placement in enumerate(d_tensor.placements) if placement.is_partial()]
    axes = sums if mesh_dims is None else _axes(d_tensor, mesh_dims)
    _require(d_tensor, axes, sums, "partial")
    return _with(d_tensor, dict.fromkeys(axes, Replicate()), async_op)


def vescale_reduce_scatter(
    d_tensor: DTensor,
    reduce_mesh_dims: int | str | Sequence[int | str] | None = None,
    scatter_dims: int | Sequence[int] | None = None,
    mesh_dims: int | str | Sequence[int | str] | None = None,
    async_op: bool = True,
) -> DTensor:
    """Return ``d_tensor`` reduced, and cut on tensor dims ``scatter_dims`` by ``mesh_dims``.

    These two have one length. ``reduce_mesh_dims``, by default all where ``d_tensor`` is
    partial, become ``Replicate`` where they do not cut. ``ValueError``: one of the two is
    missing, lengths differ, or a mesh dim is not partial.
    """
    if scatter_dims is None or mesh_dims is None:
        raise LegacyValueError(
            f"scatter_dims={scatter_dims}, mesh_dims={mesh_dims}: both are needed, tensor dims "
            "and the mesh dims that cut them."
        )
    dims = [scatter_dims] if isinstance(scatter_dims, int) else list(scatter_dims)
    cuts = _axes(d_tensor, mesh_dims)
    if len(dims) != len(cuts):
        raise LegacyValueError(
            f"scatter_dims={dims} and mesh_dims={cuts} differ in length; give one mesh dim for "
            "each tensor dim."
        )
    sums = [axis for axis, placement in enumerate(d_tensor.placements) if placement.is_partial()]
    reduced = sums if reduce_mesh_dims is None else _axes(d_tensor, reduce_mesh_dims)
    _require(d_tensor, [*reduced, *cuts], sums, "partial")
    change: dict[int, Placement] = dict.fromkeys(reduced, Replicate())
    change |= {axis: Shard(dim) for axis, dim in zip(cuts, dims, strict=True)}
    return _with(d_tensor, change, async_op)


def _with(x: DTensor, change: dict[int, Placement], async_op: bool) -> DTensor:
    placements = [change.get(axis, placement) for axis, placement in enumerate(x.placements)]
    return redistribute_dtensor(x, x.device_mesh, placements, async_op)


def _axes(x: DTensor, mesh_dims: int | str | Sequence[int | str]) -> list[int]:
    named = [mesh_dims] if isinstance(mesh_dims, int | str) else list(mesh_dims)
    names, ndim, axes = x.device_mesh.mesh_dim_names or (), x.device_mesh.ndim, []
    for name in named:
        if isinstance(name, str) and name in names:
            axes.append(names.index(name))
        elif isinstance(name, int) and -ndim <= name < ndim:
            axes.append(name % ndim)
        else:
            raise LegacyValueError(f"{name!r} is no dim of {x.device_mesh}.")
    return axes


def _require(x: DTensor, axes: Sequence[int], right: Sequence[int], word: str) -> None:
    for axis in axes:
        if axis not in right:
            raise LegacyValueError(
                f"mesh dim {axis} of a tensor under {x.placements} is not {word}; name others of "
                f"{list(right)}."
            )


def _change(x: DTensor, placements: tuple[Placement, ...], async_op: bool) -> DTensor:
    check_interleaved(x.shape, x.device_mesh, placements)
    old, ranks = x.placements, x.device_mesh.shape
    anew = _dims_cut_anew(old, placements)
    # What is interleaved is an even cut of a reordered tensor; torch moves that.
    x = interleaved.relabel(x, [_even(placement) for placement in old])
    # 1. Gather the dims that an interleaved cut leaves or comes to, inner mesh dims first.
    for axis in reversed(range(len(old))):
        if shard_dim(old[axis]) in anew:
            x = _stock(x, {axis: Replicate()}, async_op)
            if is_interleaved_shard(old[axis]):
                x = _reorder(x, interleaved.gather_order, old[axis], ranks[axis])
    # 2. All that torch does itself.
    now = {
        axis: Replicate() if _is_late(old[axis], new, anew) else _even(new)
        for axis, new in enumerate(placements)
    }
    x = _stock(x, now, async_op)
    # 3. Cut those dims anew, outer mesh dims first, and keep terms on the first rank.
    for axis, new in enumerate(placements):
        if shard_dim(new) in anew:
            if is_interleaved_shard(new):
                x = _reorder(x, interleaved.cut_order, new, ranks[axis])
            x = _stock(x, {axis: _even(new)}, async_op)
        elif new.is_partial() and new != old[axis]:
            x = _ToPartial.apply(x, axis, new)
    return interleaved.relabel(x, placements)


def _dims_cut_anew(old: Sequence[Placement], new: Sequence[Placement]) -> set[int]:
    """Return the tensor dims with an interleaved cut that is not the same before and after."""
    dims = {p.dim for p in (*old, *new) if is_interleaved_shard(p)}
    return {
        dim
        for dim in dims
        if [p if shard_dim(p) == dim else None for p in old]
        != [p if shard_dim(p) == dim else None for p in new]
    }


def _is_late(old: Placement, new: Placement, anew: set[int]) -> bool:
    return shard_dim(new) in anew or (new.is_partial() and new != old)


def _even(placement: Placement) -> Placement:
    return Shard(placement.dim) if is_interleaved_shard(placement) else placement


def _reorder(x: DTensor, order: Callable, placement: Any, ranks: int) -> DTensor:
    local = order(x.to_local(), placement.dim, interleaved_size(placement), ranks)
    return interleaved.with_local(x, local)


def _stock(x: DTensor, change: dict[int, Placement], async_op: bool) -> DTensor:
    placements = tuple(change.get(axis, old) for axis, old in enumerate(x.placements))
    if placements == x.placements:
        return x
    return x.redistribute(x.device_mesh, placements, async_op=async_op)


class _ToPartial(torch.autograd.Function):
    """From replicated on one mesh axis to partial; the gradient is the other way the same."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, axis: int, partial: Partial) -> DTensor:
        ctx.placements = x.placements
        placements = [*x.placements]
        placements[axis] = partial
        kept = [p if i == axis else Replicate() for i, p in enumerate(placements)]
        local = keep_on_first(x.to_local(), x.device_mesh, kept)
        return DTensor.from_local(
            local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None]:
        placements = [Replicate() if p.is_partial() else p for p in ctx.placements]
        return redistribute_dtensor(grad, grad.device_mesh, placements), None, None
