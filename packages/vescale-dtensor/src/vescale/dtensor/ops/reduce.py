# SPDX-License-Identifier: Apache-2.0
"""Reducing operators, as values of ``Reduction``."""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.ops.operands import checked_dims, same_layout, unsupported
from vescale.dtensor.ops.reduction import (
    Reduction,
    accumulation_dtype,
    combine,
    groups_of,
    reduce,
    split_axes,
)
from vescale.dtensor.spec import layout_of

aten = torch.ops.aten


def bind(func, args, kwargs) -> dict:
    """Return the arguments of ``func`` by name, defaults included."""
    schema = func._schema.arguments
    bound = {argument.name: argument.default_value for argument in schema}
    bound.update(zip((argument.name for argument in schema), args, strict=False))
    bound.update(kwargs)
    return bound


def dims_of(bound: dict, ref: TorchDTensor) -> list[int] | None:
    """Return the argument ``dim`` of ``bind``, checked and counted from the front."""
    dims = bound.get("dim")
    if dims is None:
        return None
    return checked_dims([dims] if isinstance(dims, int) else dims, ref.ndim)


def _sum(func, args, kwargs, ref):
    bound = bind(func, args, kwargs)
    dtype = bound["dtype"] or _sum_dtype(ref.dtype)
    wide = accumulation_dtype(dtype)
    how = Reduction(
        lambda part, dims: part.sum(dims, keepdim=True, dtype=wide),
        "sum",
        wide,
        lambda value: value.to(dtype),
    )
    return reduce(ref, dims_of(bound, ref), bound.get("keepdim", False), how)


def _mean(func, args, kwargs, ref):
    bound = bind(func, args, kwargs)
    dtype = bound["dtype"] or ref.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        one = torch.empty(1, dtype=ref.dtype)
        return func(one, *([0],) * ("dim" in bound), dtype=bound["dtype"])  # torch's error
    wide, dims = accumulation_dtype(dtype), dims_of(bound, ref)
    count = math.prod(ref.shape[dim] for dim in dims) if dims and ref.ndim else ref.numel()
    how = Reduction(
        lambda part, dims: part.sum(dims, keepdim=True, dtype=wide),
        "sum",
        wide,
        lambda value: (value / count).to(dtype),
    )
    return reduce(ref, dims, bound.get("keepdim", False), how)


def _prod(func, args, kwargs, ref):
    bound = bind(func, args, kwargs)
    dtype = bound["dtype"] or _sum_dtype(ref.dtype)
    if dtype.is_complex:
        unsupported(func, "a product of complex numbers cannot be reduced between ranks", ref)
    wide = accumulation_dtype(dtype)

    def local(part, dims):
        for dim in dims:
            part = part.prod(dim, keepdim=True, dtype=wide)
        return part

    how = Reduction(local, "product", wide, lambda value: value.to(dtype))
    return reduce(ref, dims_of(bound, ref), bound.get("keepdim", False), how)


def _extreme(op: str):
    local_op = torch.amax if op == "max" else torch.amin

    def handler(func, args, kwargs, ref):
        bound = bind(func, args, kwargs)
        dims = dims_of(bound, ref)
        if 0 in ([ref.shape[dim] for dim in dims] if dims and ref.ndim else ref.shape):
            return func(torch.empty(ref.shape, dtype=ref.dtype), *args[1:], **kwargs)  # its error
        dtype = ref.dtype
        wide = accumulation_dtype(dtype) if dtype.is_floating_point else torch.int64
        how = Reduction(
            lambda part, dims: local_op(part, dims, keepdim=True).to(wide),
            op,
            wide,
            lambda value: value.to(dtype),
        )
        return reduce(ref, dims, bound.get("keepdim", False), how)

    return handler


def _logical(op: str):
    local_op = torch.any if op == "max" else torch.all

    def handler(func, args, kwargs, ref):
        bound = bind(func, args, kwargs)
        dims = dims_of(bound, ref)
        if dims == []:
            unsupported(func, "an empty list of dims", ref)
        dtype = torch.uint8 if ref.dtype is torch.uint8 else torch.bool
        how = Reduction(
            lambda part, dims: local_op(part, tuple(dims), keepdim=True).to(torch.int32),
            op,
            torch.int32,
            lambda value: value.clamp(0, 1).to(dtype),  # no element: any is False, all is True
        )
        return reduce(ref, dims, bound.get("keepdim", False), how)

    return handler


def _variance(func, args, kwargs, ref):
    """``var``, ``std`` and both with the mean: two reductions, of the values and of deviations."""
    bound = bind(func, args, kwargs)
    dims, keepdim, dtype = dims_of(bound, ref), bound["keepdim"], ref.dtype
    if not dtype.is_floating_point:
        unsupported(func, "it takes real floating point numbers only", ref)
    correction = 1 if bound["correction"] is None else bound["correction"]
    x = aten._to_copy.default(ref, dtype=accumulation_dtype(dtype))
    count = math.prod(ref.shape[dim] for dim in dims) if dims and ref.ndim else ref.numel()
    over = dims or list(range(ref.ndim))
    mean = x.sum(over, keepdim=True) / count
    if layout_of(mean._spec) is None:  # a Shard of another axis may be left
        mean = mean.redistribute(placements=[Replicate()] * mean._spec.mesh.ndim)
    value = (x - mean).square().sum(over, keepdim=keepdim) / max(count - correction, 0)
    name = func._schema.name.removeprefix("aten::")
    value = aten._to_copy.default(value.sqrt() if name.startswith("std") else value, dtype=dtype)
    if not name.endswith("_mean"):
        return value
    mean = mean if keepdim else mean.view(value.shape)
    return value, aten._to_copy.default(mean, dtype=dtype)


def _equal(func, args, kwargs, ref):
    """``torch.equal`` and ``allclose``: the same answer on all ranks."""
    a, b = args[:2]
    if not all(isinstance(x, TorchDTensor) and same_layout(x, ref) for x in (a, b)):
        unsupported(func, "both tensors must be cut alike", a, b)
    same = func(a._local_tensor, b._local_tensor, *args[2:], **kwargs)
    flag = torch.full((), int(same), dtype=torch.int32, device=ref._local_tensor.device)
    groups = groups_of(ref._spec.mesh, split_axes(ref._spec))
    return bool(combine(flag, "min", groups))


def _check_finite_and_unscale(func, args, kwargs, ref):
    """Unscale gradients in place; ``found_inf`` becomes 1 on all ranks when one rank finds one."""
    grads, found_inf, inverse_scale = args
    for x in grads:
        if isinstance(x, TorchDTensor) and any(p.is_partial() for p in x._spec.placements):
            unsupported(func, "terms may be finite where their sum is not", x)
    found_inf, inverse_scale = _local(found_inf), _local(inverse_scale)
    func([_local(x) for x in grads], found_inf, inverse_scale, **kwargs)
    places = []
    for x in grads:
        if isinstance(x, TorchDTensor):
            mine = [(x._spec.mesh, axis) for axis in split_axes(x._spec)]
            places += [place for place in mine if place not in places]
    for mesh, axis in places:
        for group in groups_of(mesh, [axis]):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)


def _local(x):
    return x._local_tensor if isinstance(x, TorchDTensor) else x


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


REDUCTIONS = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.prod.default: _prod,
    aten.prod.dim_int: _prod,
    aten.max.default: _extreme("max"),
    aten.min.default: _extreme("min"),
    aten.amax.default: _extreme("max"),
    aten.amin.default: _extreme("min"),
    aten.any.default: _logical("max"),
    aten.any.dim: _logical("max"),
    aten.any.dims: _logical("max"),
    aten.all.default: _logical("min"),
    aten.all.dim: _logical("min"),
    aten.all.dims: _logical("min"),
    aten.equal.default: _equal,
    aten.allclose.default: _equal,
    aten.var.correction: _variance,
    aten.std.correction: _variance,
    aten.var_mean.correction: _variance,
    aten.std_mean.correction: _variance,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _check_finite_and_unscale,
}
