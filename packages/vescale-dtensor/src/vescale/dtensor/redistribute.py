# SPDX-License-Identifier: Apache-2.0
"""Which collective moves a local tensor from one list of placements to another.

Everything is checked before the first collective, so a mistake raises on all ranks alike.
"""

from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale.dtensor import comm, moves
from vescale.dtensor._torch_compat import DTensorSpec, TorchDTensor, wrap
from vescale.dtensor.moves import Move, find_move
from vescale.dtensor.placement import RaggedShard
from vescale.dtensor.spec import (
    base_placements,
    layout_of,
    local_shape,
    make_spec,
    ragged_axis,
    replace,
)
from vescale.dtensor.waiting import WaitingTensor, settled


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
    local = settled(local)
    if ragged_axis(source) is None and ragged_axis(target) is None:
        return _redistribute_plain(local, spec, target)
    target_spec = check_move(spec, target, local.dtype)
    if spec.mesh.get_coordinate() is None:
        return local
    if local.is_meta:
        return local.new_empty(local_shape(target_spec))
    if layout_of(spec) is not None:
        return _from_ragged(local, spec, target_spec)
    return _to_ragged(local, spec, target_spec)


def check_move(
    spec: DTensorSpec, placements: Sequence[Placement], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of ``placements``, or raise now what the move would raise later."""
    target_spec = _respec(spec, placements)
    _check_pair(tuple(spec.placements), target_spec.placements, dtype)
    layout_of(spec), layout_of(target_spec)
    return target_spec


def gradient_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the placements of a gradient: those of its tensor, with Partial made Replicate."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def start_redistribute(
    local: torch.Tensor, spec: DTensorSpec, placements: Sequence[Placement]
) -> torch.Tensor:
    """Begin ``redistribute_local``, and return a tensor that waits on its first use.

    ``local`` must not change before. Raises NotImplementedError, before any collective, for a
    move of several steps.
    """
    target_spec = check_move(spec, placements, local.dtype)
    if (
        spec.placements == target_spec.placements
        or local.is_meta
        or spec.mesh.get_coordinate() is None
    ):
        return redistribute_local(local, spec, placements)
    move = check_async(spec, target_spec)
    local, group = settled(local), spec.mesh.get_group(move.axis)
    if move.kind == "local":
        return moves.run(move, local, group)
    return waiting(moves.start([move], [local], group)[0], local, target_spec)


def check_async(spec: DTensorSpec, target_spec: DTensorSpec) -> Move | None:
    """Return the one move between two specs (None: nothing changes), or raise that it is more."""
    if spec.placements == target_spec.placements:
        return None
    move = find_move(spec, target_spec)
    if move is None:
        raise NotImplementedError(
            f"moving from {spec.placements} to {target_spec.placements} takes several steps, "
            "which cannot be asynchronous; use async_op=False, or change one mesh axis at a time."
        )
    return move


def waiting(
    finish: Callable[[], torch.Tensor], local: torch.Tensor, target_spec: DTensorSpec
) -> WaitingTensor:
    """Return the local tensor of ``target_spec`` that ``finish()`` will make."""
    like = torch.empty(local_shape(target_spec), dtype=local.dtype, device="meta")
    return WaitingTensor(finish, like, local.device)


def _from_ragged(local: torch.Tensor, spec: DTensorSpec, target_spec: DTensorSpec) -> torch.Tensor:
    target = target_spec.placements
    local, spec = _reduce_other_axes(local, spec, target)
    if spec.placements == target:
        return local
    move = find_move(spec, target_spec)
    if move is not None:
        return moves.run(move, local, spec.mesh.get_group(move.axis))
    base = _respec(spec, base_placements(spec.placements))
    return redistribute_local(_move_one_axis(local, spec, base), base, target)


def _to_ragged(local: torch.Tensor, spec: DTensorSpec, target_spec: DTensorSpec) -> torch.Tensor:
    source, target = spec.placements, target_spec.placements
    axis = layout_of(target_spec).axis
    if source[axis].is_partial():
        # Reduce-scatter first: the other axes then reduce only this rank's part.
        late = tuple(
            old if old.is_partial() and not new.is_shard() else new
            for old, new in zip(source, target, strict=True)
        )
        before = _respec(spec, replace(late, axis, source[axis]))
        local = _redistribute_plain(local, spec, before.placements)
        late_spec = _respec(spec, replace(late, axis, target[axis]))
        part = _move_one_axis(local, before, late_spec)
        return _reduce_other_axes(part, late_spec, target)[0]
    base = _respec(spec, base_placements(target))
    if isinstance(source[axis], Shard):
        near = _respec(spec, replace(base.placements, axis, source[axis]))
        move = find_move(near, target_spec)
        if move is not None:
            local = _redistribute_plain(local, spec, near.placements)
            return moves.run(move, local, spec.mesh.get_group(axis))
    local = _redistribute_plain(local, spec, base.placements)
    return _move_one_axis(local, base, target_spec)


def _move_one_axis(
    local: torch.Tensor, spec: DTensorSpec, target_spec: DTensorSpec
) -> torch.Tensor:
    if spec.placements == target_spec.placements:
        return local
    move = find_move(spec, target_spec)
    assert move is not None, (spec.placements, target_spec.placements)
    return moves.run(move, local, spec.mesh.get_group(move.axis))


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
        op = spec.placements[axis].reduce_op  # type: ignore[attr-defined]  # Partial
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
        if comm.is_carried(local.dtype) or any(p.is_partial() for p in spec.placements):
            return _torch_redistribute(local, _respec(spec, spec.placements), target)
        meta, dtype = spec.tensor_meta, local.dtype  # as bytes, in one more dim
        local = local.contiguous().unsqueeze(-1).view(torch.uint8)
        shape = (*meta.shape, dtype.itemsize)
        as_bytes = make_spec(spec.mesh, spec.placements, shape, torch.uint8)
        out = _torch_redistribute(local, as_bytes, target)
        return out.contiguous().view(dtype).squeeze(-1)


def _torch_redistribute(
    local: torch.Tensor, spec: DTensorSpec, target: Sequence[Placement]
) -> torch.Tensor:
    x = wrap(TorchDTensor, local, spec, requires_grad=False)
    out = x.redistribute(spec.mesh, target)._local_tensor
    return out.wait() if hasattr(out, "wait") else out  # an async tensor on some versions


def _respec(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    meta = spec.tensor_meta
    return make_spec(spec.mesh, placements, meta.shape, meta.dtype, meta.stride)


def check_no_new_partial(source: Sequence[Placement], target: Sequence[Placement]) -> None:
    """Raise RuntimeError for a move to Partial."""
    for old, new in zip(source, target, strict=True):
        if new.is_partial() and new != old:
            raise RuntimeError(
                f"cannot move from {tuple(source)} to {tuple(target)}: a tensor becomes Partial "
                "only by an operator; redistribute to Replicate, Shard or RaggedShard."
            )


def _check_pair(
    source: Sequence[Placement], target: Sequence[Placement], dtype: torch.dtype
) -> None:
    check_no_new_partial(source, target)
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
        if old.is_partial() and new != old:
            ops.add(old.reduce_op)  # type: ignore[attr-defined]  # Partial
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
