# SPDX-License-Identifier: Apache-2.0
"""Which collective moves a local tensor from one list of placements to another.

Everything is checked before the first collective, so a mistake raises on all ranks alike.
"""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale.dtensor import comm
from vescale.dtensor._torch_compat import DTensorSpec, TorchDTensor, wrap
from vescale.dtensor.layout import exchange_counts
from vescale.dtensor.placement import RaggedShard
from vescale.dtensor.shard_exchange import ragged_to_shard, shard_to_ragged
from vescale.dtensor.spec import (
    base_block,
    base_placements,
    layout_of,
    make_spec,
    ragged_axis,
    replace,
)


def redistribute_local(
    local: torch.Tensor, spec: DTensorSpec, placements: Sequence[Placement]
) -> torch.Tensor:
    """Return this rank's part under ``placements`` of the tensor that ``spec`` lays out.

    The result may be ``local`` itself when nothing changes. Collective over the mesh axes whose
    placement changes; all ranks must call. Raises NotImplementedError for placements that cannot
    be combined with a ragged one, RuntimeError for a move to Partial.
    """
    source, target = tuple(spec.placements), tuple(placements)
    if source == target:
        return local
    if ragged_axis(source) is None and ragged_axis(target) is None:
        return _redistribute_plain(local, spec, target)
    _check_move(source, target, local.dtype)
    target_spec = _respec(spec, target)
    layout_of(spec), layout_of(target_spec)  # raise now what they would raise later
    if spec.mesh.get_coordinate() is None:
        return local
    if local.is_meta:
        return local.new_empty(_local_shape(target_spec))
    if layout_of(spec) is not None:
        return _from_ragged(local, spec, target_spec)
    return _to_ragged(local, spec, target_spec)


def gradient_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the placements of a gradient: those of its tensor, with Partial made Replicate."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _from_ragged(local: torch.Tensor, spec: DTensorSpec, target_spec: DTensorSpec) -> torch.Tensor:
    mesh, target, layout = spec.mesh, target_spec.placements, layout_of(spec)
    axis = layout.axis
    local, spec = _reduce_other_axes(local, spec, target)
    if spec.placements == target:
        return local
    group, rank = mesh.get_group(axis), mesh.get_local_rank(axis)
    if replace(target, axis, spec.placements[axis]) == spec.placements:  # only this axis changes
        if isinstance(target[axis], RaggedShard):
            new = layout_of(target_spec)
            if new.split_numels == layout.split_numels:  # other names for the same ranges
                return local
            counts = exchange_counts(layout.split_numels, new.split_numels, rank)
            return comm.exchange(local, *counts, group)
        if isinstance(target[axis], Shard) and _is_last_cut(target, axis, target[axis]):
            return ragged_to_shard(local, layout, target[axis].dim, group)
    base = comm.gather(local, layout.split_numels, group).view(layout.base_shape)
    return redistribute_local(base, _respec(spec, base_placements(spec.placements)), target)


def _to_ragged(local: torch.Tensor, spec: DTensorSpec, target_spec: DTensorSpec) -> torch.Tensor:
    mesh, source, target, layout = (
        spec.mesh,
        spec.placements,
        target_spec.placements,
        layout_of(target_spec),
    )
    axis, base = layout.axis, base_placements(target)
    group = mesh.get_group(axis)
    if source[axis].is_partial():
        # Reduce-scatter first: the other axes then reduce only this rank's part.
        late = tuple(
            old if old.is_partial() and not new.is_shard() else new
            for old, new in zip(source, target, strict=True)
        )
        before = replace(late, axis, source[axis])
        local = _redistribute_plain(local, spec, before)
        numels = layout.split_numels
        part = comm.reduce_scatter(local.reshape(-1), numels, source[axis].reduce_op, group)
        late_spec = _respec(spec, replace(late, axis, target[axis]))
        return _reduce_other_axes(part, late_spec, target)[0]
    if isinstance(source[axis], Shard) and _is_last_cut(target, axis, source[axis]):
        local = _redistribute_plain(local, spec, replace(base, axis, source[axis]))
        return shard_to_ragged(local, layout, source[axis].dim, group)
    local = _redistribute_plain(local, spec, base)
    return local.reshape(-1)[layout.start : layout.end].clone()


def _reduce_other_axes(
    local: torch.Tensor, spec: DTensorSpec, target: Sequence[Placement]
) -> tuple[torch.Tensor, DTensorSpec]:
    """All-reduce a ragged ``local`` over every axis that is Partial now and not in ``target``."""
    pending = [
        axis
        for axis, (old, new) in enumerate(zip(spec.placements, target, strict=True))
        if old.is_partial() and old != new
    ]
    if pending:
        local = local.clone()
    for axis in pending:
        op = spec.placements[axis].reduce_op
        local = comm.all_reduce(local, op, spec.mesh.get_group(axis))
        spec = _respec(spec, replace(spec.placements, axis, Replicate()))
    return local, spec


def _redistribute_plain(
    local: torch.Tensor, spec: DTensorSpec, target: Sequence[Placement]
) -> torch.Tensor:
    """Hand a move between torch's own placements to torch's own DTensor."""
    if spec.placements == tuple(target):
        return local
    with torch.no_grad():
        x = wrap(TorchDTensor, local, _respec(spec, spec.placements), requires_grad=False)
        out = x.redistribute(spec.mesh, target)._local_tensor
    return out.wait() if hasattr(out, "wait") else out  # an async tensor on some versions


def _is_last_cut(target: Sequence[Placement], axis: int, shard: Shard) -> bool:
    """Tell whether ``shard`` on ``axis`` cuts what the other placements left, as ragged does.

    torch cuts one dim from the left-most mesh axis to the right-most.
    """
    return shard not in target[axis + 1 :]


def _respec(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    meta = spec.tensor_meta
    return make_spec(spec.mesh, placements, meta.shape, meta.dtype, meta.stride)


def _local_shape(spec: DTensorSpec) -> tuple[int, ...]:
    layout = layout_of(spec)
    if layout is not None:
        return (layout.numel,)
    mesh, shape = spec.mesh, tuple(spec.tensor_meta.shape)
    return base_block(shape, spec.placements, mesh.shape, mesh.get_coordinate())[0]


def _check_move(
    source: Sequence[Placement], target: Sequence[Placement], dtype: torch.dtype
) -> None:
    ops = set()
    for old, new in zip(source, target, strict=True):
        for placement in (old, new):
            if type(placement) not in (Replicate, Shard, Partial) and not isinstance(
                placement, RaggedShard
            ):
                raise NotImplementedError(
                    f"cannot move from {source} to {target}: {placement} cannot be combined with "
                    "RaggedShard; redistribute to Replicate or Shard first."
                )
        if new.is_partial() and new != old:
            raise RuntimeError(
                f"cannot move from {source} to {target}: a tensor becomes Partial only by an "
                "operator; redistribute to Replicate, Shard or RaggedShard."
            )
        if old.is_partial() and new != old:
            ops.add(old.reduce_op)
    if len(ops) > 1 or not ops <= comm.REDUCE_OPS.keys():
        raise NotImplementedError(
            f"cannot move from {source} to {target}: reductions {sorted(ops)} cannot be done in "
            f"one move; known are {sorted(comm.REDUCE_OPS)}, one at a time."
        )
    if "avg" in ops and not (dtype.is_floating_point or dtype.is_complex):
        raise NotImplementedError(
            f"cannot average {dtype} tensors from {source} to {target}; use Partial('sum')."
        )
    if ops & {"max", "min", "product"} and dtype.is_complex:
        raise NotImplementedError(f"cannot reduce {dtype} tensors from {source} to {target}.")
