# SPDX-License-Identifier: Apache-2.0
"""Elementwise operators, and those that make, copy or cast a tensor of the same shape."""

import torch

from vescale.dtensor._torch_compat import TorchDTensor, kernel, wrap
from vescale.dtensor.ops.operands import (
    USUAL_CAUSES,
    alike,
    local_operand,
    mixed,
    result_like,
    rewrap,
    same_layout,
    unsupported,
)
from vescale.dtensor.redistribute import redistribute_local
from vescale.dtensor.spec import check_is_ours, layout_of, replicated_spec

aten = torch.ops.aten

# Elementwise operators that torch (checked on 2.11, 2.13 and 2.15) does not tag pointwise.
LIKE_POINTWISE = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.lift_fresh.default,
    aten.ones_like.default,
    aten.zeros_like.default,
    aten._conj_physical.default,
    aten._to_copy.default,
    aten.complex.default,
    aten.elu_backward.default,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.floor_divide_.Tensor,
    aten.hardshrink_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu.default,
    aten.leaky_relu_backward.default,
    aten.masked_fill.Tensor,
    aten.polar.default,
    aten.rsub.Tensor,
    aten.softplus_backward.default,
    aten.softshrink_backward.default,
}

_OTHER_ORDERS = (torch.channels_last, torch.channels_last_3d)


def pointwise(func, args, kwargs, ref):
    """Run ``func`` on the local parts; the result is laid out like ``ref``."""
    spec = ref._spec
    local = _aligned(args, spec)
    if local is None:
        if any(isinstance(a, torch.Tensor) and a.ndim and a.shape != ref.shape for a in args):
            ref = result_like(func, args, ref)
            spec = ref._spec
        local = [local_operand(func, a, ref) for a in args]
    out = kernel(func)(*local, **_local_kwargs(func, kwargs, ref))
    if isinstance(out, torch.Tensor):
        if out.dtype is spec.tensor_meta.dtype:
            return wrap(type(ref), out, spec, requires_grad=False)
        return rewrap(out, ref)
    return type(out)(rewrap(part, ref) for part in out)


def pointwise_inplace(func, args, kwargs, ref):
    """Run ``func`` in place on the local part of the first argument, and return that argument."""
    target = args[0]
    if not isinstance(target, TorchDTensor):
        mixed(func, target, ref)
    if target is not ref and not same_layout(target, ref):
        reason = "the tensor written to is placed differently"
        unsupported(func, reason, *args, hint=USUAL_CAUSES)
    kernel(func)(*_locals(func, args, ref), **_local_kwargs(func, kwargs, ref))
    return target


def pointwise_out(func, args, kwargs, ref):
    """Run ``func`` with ``out=``, which must be cut like the operands; return ``out``."""
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    outs = [kwargs[name] for name in names]
    for out in outs:
        if not isinstance(out, TorchDTensor) or not same_layout(out, ref):
            unsupported(func, "out= must be a tensor of the same placements", ref, out)
    func(*_locals(func, args, ref), **_local_kwargs(func, kwargs, ref))
    return outs[0] if len(outs) == 1 else tuple(outs)


def copy_(func, args, kwargs, ref):
    """Copy from any placement into any other; redistributes where they differ."""
    target, source = args[:2]
    if isinstance(target, TorchDTensor) and isinstance(source, TorchDTensor):
        check_is_ours(target)
        check_is_ours(source)
        aligned = layout_of(target._spec) is not None and same_layout(source, target)
        if not aligned and source._spec.mesh == target._spec.mesh and source.shape == target.shape:
            local = redistribute_local(source._local_tensor, source._spec, target._spec.placements)
            func(target._local_tensor, local, *args[2:], **kwargs)
            return target
    return pointwise_inplace(func, args, kwargs, ref)


def _aligned(args, spec):
    """Return the local operands when all are laid out as ``spec`` says, or are scalars."""
    local = []
    for a in args:
        if isinstance(a, TorchDTensor):
            if (a._spec is not spec and not alike(a._spec, spec)) or type(a) is TorchDTensor:
                return None
            a = a._local_tensor
        elif isinstance(a, torch.Tensor) and a.ndim:
            return None
        local.append(a)
    return local


def _locals(func, args, ref):
    local = _aligned(args, ref._spec)
    return [local_operand(func, a, ref) for a in args] if local is None else local


def _local_kwargs(func, kwargs, ref):
    if not kwargs:
        return kwargs
    if kwargs.get("memory_format") in _OTHER_ORDERS:
        unsupported(func, f"{kwargs['memory_format']} is not the row-major order it is cut in", ref)
    return {name: local_operand(func, value, ref) for name, value in kwargs.items()}


def _conj(func, args, kwargs, ref):
    """Conjugate at once: torch would leave a mark on the local tensor for a later pass."""
    return pointwise(aten._conj_physical.default, args, kwargs, ref)


def _index_put_(func, args, kwargs, ref):
    """``x[mask] = number`` in place, which is elementwise; no other index is."""
    target, indices, value, *accumulate = args
    mask = indices[0] if len(indices) == 1 else None
    if isinstance(value, TorchDTensor) or value.ndim or any(accumulate) or kwargs:
        unsupported(func, "only one number can be put, and not be accumulated", *args)
    if mask is None or mask.dtype is not torch.bool or mask.shape != target.shape:
        unsupported(func, "only a mask of the same shape can be an index", target)
    return pointwise_inplace(aten.masked_fill_.Tensor, [target, mask, value], {}, ref)


def _new(func, args, kwargs, ref):
    """``x.new_zeros(size)`` and its like: laid out as ``x`` if of its shape, else replicated."""
    size = torch.Size(args[1])
    if size == ref.shape:
        local = ref._local_tensor
        return rewrap(func(local, [local.numel()], *args[2:], **kwargs), ref)
    local = func(ref._local_tensor, *args[1:], **kwargs)
    spec = replicated_spec(ref._spec, local.shape, local.stride(), local.dtype)
    return wrap(type(ref), local, spec, requires_grad=False)


def _new_empty_strided(func, args, kwargs, ref):
    """``x.new_empty_strided(size, stride)``: autograd makes the memory of a gradient so."""
    if torch.Size(args[1]) != ref.shape:
        return _new(func, args, kwargs, ref)
    if tuple(args[2]) != ref.stride():
        unsupported(func, f"strides {tuple(args[2])} are not those of a row-major tensor", ref)
    return pointwise(aten.empty_like.default, [ref], kwargs, ref)


SHAPED_ALIKE = {
    aten.copy_.default: copy_,
    aten.fill_.Scalar: pointwise_inplace,
    aten.fill_.Tensor: pointwise_inplace,
    aten.zero_.default: pointwise_inplace,
    aten._conj.default: _conj,
    aten.index_put_.default: _index_put_,
    aten.new_empty.default: _new,
    aten.new_empty_strided.default: _new_empty_strided,
    aten.new_full.default: _new,
    aten.new_ones.default: _new,
    aten.new_zeros.default: _new,
}
