# SPDX-License-Identifier: Apache-2.0
"""Reductions of a ragged tensor to a scalar: one local reduction, one all-reduce per mesh axis.

The result is replicated. Half types are summed in float32, also between ranks.
"""

import torch
import torch.distributed as dist

from vescale.dtensor import comm
from vescale.dtensor._torch_compat import DTensorSpec, TorchDTensor, wrap
from vescale.dtensor.ops.operands import same_layout, unsupported
from vescale.dtensor.spec import scalar_spec

aten = torch.ops.aten
_HALF = {torch.float16, torch.bfloat16}


def split_axes(spec: DTensorSpec) -> list[int]:
    """Return the mesh axes whose ranks hold different parts of the tensor."""
    return [axis for axis, placement in enumerate(spec.placements) if not placement.is_replicate()]


def all_reduce_axes(value: torch.Tensor, spec: DTensorSpec, op: str) -> torch.Tensor:
    """Reduce ``value`` over every mesh axis that splits the tensor; in place."""
    if value.is_meta:
        return value
    for axis in split_axes(spec):
        value = comm.all_reduce(value, op, spec.mesh.get_group(axis))
    return value


def all_reduce_extreme(value: torch.Tensor, spec: DTensorSpec, op: str) -> torch.Tensor:
    """Reduce by "max" or "min" so that a NaN anywhere makes the result NaN, as torch does.

    Backends differ in what their max does with NaN, so a flag travels in the same message.
    """
    if not value.is_floating_point():
        return all_reduce_axes(value, spec, op)
    sign = 1.0 if op == "max" else -1.0
    nan = value.isnan()
    both = torch.stack([value.masked_fill(nan, -sign * float("inf")), nan.to(value.dtype) * sign])
    both = all_reduce_axes(both, spec, op)
    return both[0].masked_fill(both[1] != 0, float("nan"))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums and norms of ``dtype`` are formed and sent."""
    return torch.float32 if dtype in _HALF else dtype


def replicated_scalar(
    value: torch.Tensor, ref: TorchDTensor, spec: DTensorSpec | None = None
) -> TorchDTensor:
    """Wrap a 0-dim tensor that all ranks share, on the mesh of ``spec`` or else of ``ref``."""
    spec = scalar_spec(spec or ref._spec, value.dtype)
    return wrap(type(ref), value, spec, requires_grad=False)


def _sum(func, args, kwargs, ref):
    local = ref._local_tensor
    dtype = kwargs.get("dtype") or _sum_dtype(local.dtype)
    value = local.sum(dtype=accumulation_dtype(dtype))
    return replicated_scalar(all_reduce_axes(value, ref._spec, "sum").to(dtype), ref)


def _mean(func, args, kwargs, ref):
    local = ref._local_tensor
    dtype = kwargs.get("dtype") or local.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return func(local, **kwargs)  # raises torch's own error
    value = local.sum(dtype=accumulation_dtype(dtype))
    value = all_reduce_axes(value, ref._spec, "sum") / ref.numel()
    return replicated_scalar(value.to(dtype), ref)


def _prod(func, args, kwargs, ref):
    local = ref._local_tensor
    dtype = kwargs.get("dtype") or _sum_dtype(local.dtype)
    if dtype.is_complex:
        unsupported(func, "a product of complex numbers cannot be reduced between ranks", ref)
    value = local.prod(dtype=accumulation_dtype(dtype))
    return replicated_scalar(all_reduce_axes(value, ref._spec, "product").to(dtype), ref)


def _extreme(op):
    def reduce(func, args, kwargs, ref):
        local = ref._local_tensor
        if ref.numel() == 0:
            return func(local, **kwargs)  # raises torch's own error
        wide = accumulation_dtype(local.dtype) if local.is_floating_point() else torch.int64
        if local.numel():
            value = func(local, **kwargs).to(wide)
        else:
            value = local.new_full((), _identity(wide, op), dtype=wide)
        return replicated_scalar(all_reduce_extreme(value, ref._spec, op).to(local.dtype), ref)

    return reduce


def _logical(op):
    def reduce(func, args, kwargs, ref):
        value = func(ref._local_tensor)  # False for any, True for all, where there is no element
        flag = all_reduce_axes(value.to(torch.int32), ref._spec, op)
        return replicated_scalar(flag.to(value.dtype), ref)

    return reduce


def _equal(func, args, kwargs, ref):
    """``torch.equal``: the same answer on all ranks."""
    a, b = args
    if not (isinstance(a, TorchDTensor) and isinstance(b, TorchDTensor)) or not (
        same_layout(a, ref) and same_layout(b, ref)
    ):
        unsupported(func, "both tensors must be cut alike", a, b)
    same = torch.tensor(
        int(func(a._local_tensor, b._local_tensor)),
        dtype=torch.int32,
        device=ref._local_tensor.device,
    )
    return bool(all_reduce_axes(same, ref._spec, "min"))


def check_finite_and_unscale(func, args, kwargs, ref):
    """Unscale gradients in place; ``found_inf`` becomes 1 on all ranks when one rank finds one."""
    grads, found_inf, inverse_scale = (_local_part(a) for a in args)
    func(grads, found_inf, inverse_scale, **kwargs)
    groups = []
    for x in args[0]:
        if isinstance(x, TorchDTensor):
            places = [(x._spec.mesh, axis) for axis in split_axes(x._spec)]
            groups += [place for place in places if place not in groups]
    for mesh, axis in groups:
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))


def _local_part(a):
    if type(a) in (list, tuple):
        return [_local_part(x) for x in a]
    return getattr(a, "_local_tensor", a)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def _identity(dtype: torch.dtype, op: str) -> float | int:
    if dtype.is_floating_point:
        return -float("inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


REDUCTIONS = {
    aten.sum.default: _sum,
    aten.mean.default: _mean,
    aten.prod.default: _prod,
    aten.max.default: _extreme("max"),
    aten.min.default: _extreme("min"),
    aten.any.default: _logical("max"),
    aten.all.default: _logical("min"),
    aten.equal.default: _equal,
    aten._amp_foreach_non_finite_check_and_unscale_.default: check_finite_and_unscale,
}
