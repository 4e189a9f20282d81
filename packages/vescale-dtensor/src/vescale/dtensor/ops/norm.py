# SPDX-License-Identifier: Apache-2.0
"""Vector norms of whole tensors: a list of any length costs one all-reduce per mesh axis."""

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor import comm
from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.ops.operands import unsupported
from vescale.dtensor.ops.reduce import accumulation_dtype, replicated_scalar, split_axes

aten = torch.ops.aten


def foreach_norm(func, args, kwargs, ref):
    """``_foreach_norm(tensors, ord=2, dtype=None)``; meshes and placements may be mixed."""
    order = float(args[1]) if len(args) > 1 else 2.0
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return norms(args[0], order, dtype, ref)


def vector_norm(func, args, kwargs, ref):
    """``linalg.vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None)`` over all dims."""
    x, order, dim, keepdim = (*args, *(2.0, None, False)[len(args) - 1 :])
    if (dim is not None and len(dim) not in (0, x.ndim)) or keepdim:
        unsupported(func, "norms over some of the dims are not available", ref)
    return norms([x], float(order), kwargs.get("dtype"), ref)[0]


def legacy_norm(func, args, kwargs, ref):
    """``norm.Scalar(x, p=2)`` and ``norm.ScalarOpt_dtype(x, p, *, dtype)``."""
    order = args[1] if len(args) > 1 and args[1] is not None else 2.0
    return norms([args[0]], float(order), kwargs.get("dtype"), ref)[0]


def legacy_norm_dims(func, args, kwargs, ref):
    """``norm.ScalarOpt_dim(x, p, dim, keepdim=False)`` over all dims."""
    x, order, dim = args[:3]
    order = 2.0 if order is None else float(order)
    return vector_norm(func, (x, order, list(dim), *args[3:]), kwargs, ref)


def norms(
    tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None, ref: TorchDTensor
) -> list[torch.Tensor]:
    """Return the ``order``-norm of every tensor as a replicated scalar (plain for plain ones)."""
    locals_ = [getattr(x, "_local_tensor", x) for x in tensors]
    groups: dict = {}
    for index, (x, local) in enumerate(zip(tensors, locals_, strict=True)):
        mesh = x._spec.mesh if isinstance(x, TorchDTensor) else None
        groups.setdefault((mesh, local.device), []).append(index)
    out = [None] * len(tensors)
    for (mesh, _), members in groups.items():
        wide = accumulation_dtype(dtype or _widest([locals_[i].dtype for i in members]))
        values = _local_norms([locals_[i] for i in members], order, wide)
        if mesh is not None and not values.is_meta:
            values = _combine(values, order, mesh, [split_axes(tensors[i]._spec) for i in members])
        for i, value in zip(members, values.unbind(), strict=True):
            value = value.to(dtype or locals_[i].dtype.to_real())
            out[i] = value if mesh is None else replicated_scalar(value, ref, tensors[i]._spec)
    return out


def _local_norms(parts: list[torch.Tensor], order: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the norms of the local parts, ``[len(parts)]``; an empty part has the neutral one."""
    neutral = math.inf if order == -math.inf else 0.0
    full = [part for part in parts if part.numel()]
    found = iter(torch._foreach_norm(full, order, dtype) if full else ())
    if len(full) == len(parts):
        return torch.stack(tuple(found))
    empty = torch.full((), neutral, dtype=dtype.to_real(), device=parts[0].device)
    return torch.stack([next(found) if part.numel() else empty for part in parts])


def _combine(
    values: torch.Tensor, order: float, mesh: DeviceMesh, axes: list[list[int]]
) -> torch.Tensor:
    """Combine local norms over the mesh axes that split each tensor (``axes``, per tensor)."""
    if math.isinf(order):
        return _combine_extremes(values, "max" if order > 0 else "min", mesh, axes)
    sums = values if order in (0.0, 1.0) else values.pow(order)
    for axis in sorted(set().union(*axes)):
        # A tensor that is replicated over this axis counts once, by its first rank.
        whole = [index for index, split in enumerate(axes) if axis not in split]
        if whole and mesh.get_local_rank(axis) != 0:
            sums[whole] = 0
        sums = comm.all_reduce(sums, "sum", mesh.get_group(axis))
    return sums if order in (0.0, 1.0) else sums.pow_(1.0 / order)


def _combine_extremes(
    values: torch.Tensor, op: str, mesh: DeviceMesh, axes: list[list[int]]
) -> torch.Tensor:
    nan, sign = values.isnan(), (1.0 if op == "max" else -1.0)
    both = torch.stack([values.masked_fill(nan, -sign * math.inf), nan.to(values.dtype) * sign])
    for axis in sorted(set().union(*axes)):
        both = comm.all_reduce(both, op, mesh.get_group(axis))
    return both[0].masked_fill(both[1] != 0, math.nan)


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    widest = dtypes[0]
    for dtype in set(dtypes):
        widest = torch.promote_types(widest, dtype)
    return widest


NORMS = {
    aten._foreach_norm.Scalar: foreach_norm,
    aten.linalg_vector_norm.default: vector_norm,
    aten.norm.Scalar: legacy_norm,
    aten.norm.ScalarOpt_dtype: legacy_norm,
    aten.norm.ScalarOpt_dim: legacy_norm_dims,
    aten.norm.ScalarOpt_dim_dtype: legacy_norm_dims,
}
