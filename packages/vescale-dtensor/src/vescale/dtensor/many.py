# SPDX-License-Identifier: Apache-2.0
"""Move many DTensors in few collectives."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from vescale.dtensor import autograd, moves
from vescale.dtensor._torch_compat import DTensorSpec, TorchDTensor, wrap
from vescale.dtensor.layout import contiguous_stride
from vescale.dtensor.moves import Move, find_move
from vescale.dtensor.redistribute import (
    check_async,
    check_move,
    check_no_new_partial,
    gradient_placements,
    waiting,
)
from vescale.dtensor.spec import (
    check_fits_every_rank,
    check_is_ours,
    make_spec,
    normalize_placements,
    ragged_axis,
)
from vescale.dtensor.tensor import DTensor
from vescale.dtensor.waiting import settled

Targets = list[tuple[Placement, ...]]


def redistribute_many(
    dtensors: Sequence[TorchDTensor],
    placements: Sequence[Placement] | Sequence[Sequence[Placement]],
    *,
    mesh: DeviceMesh | None = None,
    bucket_bytes: int = 4 << 20,
    async_op: bool = False,
) -> list[DTensor]:
    """Return ``dtensors`` in other placements, with one collective for each bucket of like moves.

    ``placements`` is one list for all of them, or a list of lists, one for each. Moves of one
    kind (Ragged or Shard to Replicate, Ragged and Shard to each other where one is ragged,
    Partial to Ragged, Shard or Replicate) over the same mesh axis, of one dtype, share a
    collective until together they hold ``bucket_bytes`` bytes, counted over the whole tensors.
    A tensor above an eighth of that travels alone and is not copied into a bucket. Collectives
    begin before the first is waited for. Every other move is done on its own, as
    ``redistribute`` does it. The values are those of ``redistribute``; sums may be taken in
    another order.

    Results share no memory with each other; one whose placements stay shares that of its source.
    With ``async_op=True`` results wait on their first use, and sources must not change before.
    Differentiable: the backward moves back those results that have a gradient, again in few
    collectives, so all ranks must use the same results.

    ``mesh``, when given, must be the mesh of every tensor. Raises TypeError and ValueError for
    wrong arguments, NotImplementedError for another mesh or, with ``async_op=True``, a move of
    several steps: all before any collective.
    """
    if isinstance(dtensors, torch.Tensor):
        raise TypeError(
            "redistribute_many takes a list of DTensors, got one tensor; write "
            "redistribute_many([x], placements), or x.redistribute(placements=placements)."
        )
    sources = [_as_ours(x) for x in dtensors]
    targets = _targets(sources, placements, mesh)
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes={bucket_bytes}, but a bucket holds at least one byte.")
    if not sources:
        return []
    for x, target in zip(sources, targets, strict=True):
        if target != x._spec.placements:  # those it has may differ between ranks
            check_fits_every_rank(x._spec.mesh, target, x.shape)
        _check(x, target, async_op)
    return list(_RedistributeMany.apply(targets, bucket_bytes, async_op, *sources))


class _RedistributeMany(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, targets: list, bucket_bytes: int, async_op: bool, *xs: DTensor
    ) -> tuple[DTensor, ...]:
        ctx.bucket_bytes = bucket_bytes
        ctx.placements = [gradient_placements(x._spec.placements) for x in xs]
        ctx.set_materialize_grads(False)
        return tuple(_move_all(xs, targets, bucket_bytes, async_op))

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple:
        used = [index for index, grad in enumerate(grads) if grad is not None]
        targets = [ctx.placements[index] for index in used]
        sources = [_as_ours(grads[index]) for index in used]
        moved = _RedistributeMany.apply(targets, ctx.bucket_bytes, False, *sources) if used else ()
        back = dict(zip(used, moved, strict=True))
        return None, None, None, *(back.get(index) for index in range(len(grads)))


def _move_all(
    xs: Sequence[DTensor], targets: Targets, bucket_bytes: int, async_op: bool
) -> list[DTensor]:
    specs = [_target_spec(x, target) for x, target in zip(xs, targets, strict=True)]
    found = [_bucket_move(x, spec) for x, spec in zip(xs, specs, strict=True)]
    alone = [index for index, move in enumerate(found) if move is None]
    out: list[DTensor | None] = [None] * len(xs)
    finishes: list[tuple] = []
    for bucket in _buckets(xs, found, bucket_bytes):
        group = xs[bucket[0]]._spec.mesh.get_group(found[bucket[0]].axis)
        locals_ = [settled(xs[index]._local_tensor) for index in bucket]
        started = moves.start([found[index] for index in bucket], locals_, group)
        finishes += zip(bucket, started, strict=True)
    for index, finish in finishes:
        x, target_spec = xs[index], specs[index]
        local = waiting(finish, x._local_tensor, target_spec) if async_op else finish()
        out[index] = wrap(DTensor, local, target_spec, requires_grad=x.requires_grad)
    for index in alone:
        out[index] = _move_alone(xs[index], targets[index], async_op)
    return out


def _move_alone(x: DTensor, target: tuple[Placement, ...], async_op: bool) -> DTensor:
    if ragged_axis(target) is None:
        return x.redistribute(placements=target, async_op=async_op)
    return autograd.Redistribute.apply(x, target, None, None, async_op)


def _bucket_move(x: DTensor, target_spec: DTensorSpec) -> Move | None:
    """Return the move of ``x`` when it may share a collective, else None."""
    spec, meta = x._spec, x._spec.tensor_meta
    if x.is_meta or spec.mesh.get_coordinate() is None:
        return None
    if tuple(meta.stride) != contiguous_stride(meta.shape):
        return None
    move = find_move(spec, target_spec)
    return move if move is not None and move.kind != "local" else None


def _buckets(
    xs: Sequence[DTensor], found: Sequence[Move | None], bucket_bytes: int
) -> list[list[int]]:
    """Return lists of indices into ``xs`` that share a collective: the same on every rank."""
    done: list[list[int]] = []
    filling: dict[Any, Any] = {}
    for index, (x, move) in enumerate(zip(xs, found, strict=True)):
        if move is None:
            continue
        nbytes = x.numel() * x.dtype.itemsize
        key = (x._spec.mesh, move.kind, move.axis, move.op, x.dtype, x.device)
        bucket, held = filling.get(key, ([], 0))
        if nbytes > bucket_bytes // 8:
            done.append([index])
            continue
        if held + nbytes > bucket_bytes:
            done.append(bucket)
            bucket, held = [], 0
        bucket.append(index)
        filling[key] = (bucket, held + nbytes)
    return sorted(done + [bucket for bucket, _ in filling.values()])


def _target_spec(x: DTensor, target: tuple[Placement, ...]) -> DTensorSpec:
    meta = x._spec.tensor_meta
    return make_spec(x._spec.mesh, target, meta.shape, meta.dtype)


def _check(x: DTensor, target: tuple[Placement, ...], async_op: bool) -> None:
    """Raise for a move that ``redistribute`` would refuse."""
    spec = x._spec
    if ragged_axis(spec.placements) is None and ragged_axis(target) is None:
        check_no_new_partial(spec.placements, target)
        return
    target_spec = check_move(spec, target, x.dtype)
    if async_op and not x.is_meta and spec.mesh.get_coordinate() is not None:
        check_async(spec, target_spec)


def _targets(sources: Sequence[DTensor], placements: Sequence, mesh: DeviceMesh | None) -> Targets:
    if isinstance(placements, Placement):
        raise TypeError(
            f"redistribute_many got placements={placements!r}; give a list with one placement per "
            "mesh axis, or a list of such lists, one for each tensor."
        )
    placements = list(placements)
    if all(isinstance(placement, Placement) for placement in placements):
        placements = [placements] * len(sources)
    if len(placements) != len(sources):
        raise ValueError(
            f"redistribute_many got {len(sources)} tensors and {len(placements)} lists of "
            "placements; give one list for all, or one for each."
        )
    for x in sources:
        if mesh is not None and x._spec.mesh != mesh:
            raise NotImplementedError(
                f"redistribute_many got mesh={mesh}, but a tensor on {x._spec.mesh}; leave mesh "
                "out, or use full_tensor() and distribute_tensor() to change meshes."
            )
    return [
        normalize_placements(target, x._spec.mesh, x.ndim)
        for x, target in zip(sources, placements, strict=True)
    ]


def _as_ours(x: TorchDTensor) -> DTensor:
    if not isinstance(x, TorchDTensor):
        raise TypeError(
            f"redistribute_many takes DTensors, got {type(x).__name__}; use distribute_tensor or "
            "DTensor.from_local first."
        )
    check_is_ours(x)
    return x if isinstance(x, DTensor) else autograd.FromTorch.apply(x, DTensor)
