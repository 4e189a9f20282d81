# SPDX-License-Identifier: Apache-2.0
"""Vector norms: for a list of whole tensors, of any length, one all-reduce per mesh axis."""

import functools
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor._torch_compat import DTensorSpec, TorchDTensor, wrap
from vescale.dtensor._torch_compat import foreach_norm as local_foreach_norm
from vescale.dtensor.ops.operands import unsupported
from vescale.dtensor.ops.reduce import bind, dims_of
from vescale.dtensor.ops.reduction import (
    Reduction,
    accumulation_dtype,
    combine,
    groups_of,
    reduce,
    split_axes,
)
from vescale.dtensor.spec import check_is_ours, layout_of, replicated_spec

aten = torch.ops.aten


def foreach_norm(func, args, kwargs, ref):
    """``_foreach_norm(tensors, ord=2, dtype=None)``; meshes and placements may be mixed.

    Plain tensors may not: each rank may have its own, and would get another norm of all.
    """
    order = float(args[1]) if len(args) > 1 else 2.0
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    for x in args[0]:
        if not isinstance(x, TorchDTensor):
            raise RuntimeError(
                f"{func} got DTensors and a plain tensor of shape {tuple(x.shape)}, which may "
                "differ between ranks: a parameter outside of every sharded module, perhaps. Shard "
                "it too, say with fully_shard on the model itself; or, where all ranks hold the "
                "same, make it replicated, distribute_tensor(x, mesh, [Replicate()]), or clip with "
                "vescale.fsdp.clip_grad_norm_."
            )
        check_is_ours(x)
        if _is_pending(x._spec):
            unsupported(func, "a Partial placement still has to be reduced", x)
    return norms(args[0], order, dtype, ref)


def _is_pending(spec: DTensorSpec) -> bool:
    layout = layout_of(spec)
    if layout is not None:  # knows it already
        return layout.pending
    return any(placement.is_partial() for placement in spec.placements)


def vector_norm(func, args, kwargs, ref):
    """``linalg.vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None)`` and ``norm``."""
    bound = bind(func, args, kwargs)
    order = bound.get("ord", bound.get("p"))
    order = 2.0 if order is None else float(order)
    dims, keepdim, dtype = dims_of(bound, ref), bound.get("keepdim", False), bound.get("dtype")
    if not dims and not keepdim:
        return norms([ref], order, dtype, ref)[0]
    dtype = dtype or ref.dtype
    wide = accumulation_dtype(dtype)
    if math.isinf(order):
        pick, op = (torch.amax, "max") if order > 0 else (torch.amin, "min")
        if 0 in [ref.shape[dim] for dim in dims or range(ref.ndim)]:
            return func(torch.empty(ref.shape, dtype=ref.dtype), *args[1:], **kwargs)  # its error
        how = Reduction(
            lambda part, dims: pick(part.abs(), dims, keepdim=True).to(wide.to_real()),
            op,
            wide.to_real(),
            lambda value: value.to(dtype.to_real()),
        )
    else:
        power = (lambda x: x != 0) if order == 0 else (lambda x: x.to(wide).abs().pow_(order))
        root = 1.0 if order == 0 else 1.0 / order
        how = Reduction(
            lambda part, dims: power(part).sum(dims, keepdim=True, dtype=wide.to_real()),
            "sum",
            wide.to_real(),
            lambda value: value.pow_(root).to(dtype.to_real()),
        )
    return reduce(ref, dims, keepdim, how)


def norms(
    tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None, ref: TorchDTensor
) -> list[torch.Tensor]:
    """Return the ``order``-norm of every tensor as a replicated scalar (plain for plain ones)."""
    specs = [getattr(x, "_spec", None) for x in tensors]
    parts = [getattr(x, "_local_tensor", x) for x in tensors]
    out: list = [None] * len(tensors)
    for mesh, members in _group(specs, parts):
        mine = [parts[i] for i in members]
        dtypes = {part.dtype for part in mine}
        wide = accumulation_dtype(dtype or functools.reduce(torch.promote_types, dtypes))
        values = _local_norms(mine, order, wide)
        if mesh is not None and not values.is_meta and mesh.get_coordinate() is not None:
            values = _combine(values, order, mesh, [split_axes(specs[i]) for i in members])
        real = {kind: dtype or kind.to_real() for kind in dtypes}
        if len(set(real.values())) == 1:
            values = values.to(real[mine[0].dtype])
        if mesh is not None:  # one spec for all
            home = specs[members[0]]
            lifted = {kind: replicated_spec(home, (), (), kind) for kind in real.values()}
        for i, part, value in zip(members, mine, values.unbind(), strict=True):
            kind = real[part.dtype]
            if value.dtype is not kind:
                value = value.to(kind)
            if mesh is not None:
                value = wrap(type(ref), value, lifted[kind], requires_grad=False)
            out[i] = value
    return out


def _group(specs: list, parts: list[torch.Tensor]):
    """Yield (mesh or None, indices) for tensors that are reduced in one message."""
    groups: dict = {}
    mesh, device, last = None, None, None
    for index, (spec, part) in enumerate(zip(specs, parts, strict=True)):
        here = None if spec is None else spec.mesh
        if last is None or here is not mesh or part.device != device:
            mesh, device = here, part.device
            last = groups.setdefault((mesh, device), [])
        last.append(index)
    return [(mesh, members) for (mesh, _), members in groups.items()]


def _local_norms(parts: list[torch.Tensor], order: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the norms of the local parts, ``[len(parts)]``; an empty part has the neutral one."""
    neutral = math.inf if order == -math.inf else 0.0
    full = [part for part in parts if part.numel()]
    found = iter(local_foreach_norm(full, order, dtype) if full else ())
    if len(full) == len(parts):
        return torch.stack(tuple(found))
    empty = torch.full((), neutral, dtype=dtype.to_real(), device=parts[0].device)
    return torch.stack([next(found) if part.numel() else empty for part in parts])


def _combine(
    values: torch.Tensor, order: float, mesh: DeviceMesh, axes: list[list[int]]
) -> torch.Tensor:
    """Combine local norms over the mesh axes that split each tensor (``axes``, per tensor)."""
    used = sorted(set().union(*axes))
    if math.isinf(order):  # what is replicated over an axis is not changed by its maximum
        return combine(values, "max" if order > 0 else "min", groups_of(mesh, used))
    sums = values if order in (0.0, 1.0) else values.pow_(order)
    for axis in used:
        # A tensor that is replicated over this axis counts once, by its first rank.
        whole = [index for index, split in enumerate(axes) if axis not in split]
        if whole and mesh.get_local_rank(axis) != 0:
            sums[whole] = 0
        sums = combine(sums, "sum", groups_of(mesh, [axis]))
    return sums if order in (0.0, 1.0) else sums.pow_(1.0 / order)


NORMS = {
    aten._foreach_norm.Scalar: foreach_norm,
    aten.linalg_vector_norm.default: vector_norm,
    aten.norm.Scalar: vector_norm,
    aten.norm.ScalarOpt_dtype: vector_norm,
    aten.norm.ScalarOpt_dim: vector_norm,
    aten.norm.ScalarOpt_dim_dtype: vector_norm,
}
