# SPDX-License-Identifier: Apache-2.0
"""Differentiable steps between local tensors, torch's DTensor and ours.

Each backward is written with differentiable calls, so gradients of gradients work. ``cls`` is our
DTensor class, handed in so that this module lies below it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from vescale.dtensor._torch_compat import (
    DTensorSpec,
    TorchDTensor,
    from_local_needs_gradient,
    wrap,
)
from vescale.dtensor.redistribute import (
    gradient_placements,
    redistribute_local,
    start_redistribute,
)
from vescale.dtensor.runs import locate, total
from vescale.dtensor.spec import (
    layout_of,
    make_spec,
    normalize_placements,
    ragged_axis,
    ragged_spec,
    spec_with_dtype,
)


class Redistribute(torch.autograd.Function):
    """Move to ``placements``; the backward moves the gradient back."""

    @staticmethod
    def forward(ctx, x, placements, forward_dtype, backward_dtype, async_op):
        ctx.cls, ctx.spec, ctx.dtype = type(x), x._spec, x._local_tensor.dtype
        ctx.backward_dtype = backward_dtype
        ctx.set_materialize_grads(False)
        local, spec = x._local_tensor, x._spec
        if forward_dtype is not None and forward_dtype != local.dtype:
            local, spec = local.to(forward_dtype), spec_with_dtype(spec, forward_dtype)
        move = start_redistribute if async_op else redistribute_local
        out = move(local, spec, placements)  # one side is ragged: row-major
        if out is x._local_tensor:
            out = out.view_as(out)  # the result must not share autograd's metadata
        out_spec = make_spec(spec.mesh, placements, spec.tensor_meta.shape, out.dtype)
        return wrap(type(x), out, out_spec, requires_grad=x.requires_grad)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None, None, None, None
        grad = _ours(grad, ctx.cls)
        placements = gradient_placements(ctx.spec.placements)
        if ctx.backward_dtype is not None:
            grad = grad.to(ctx.backward_dtype)
        grad = _moved_back(grad, placements)
        return grad.to(ctx.dtype), None, None, None, None


class ToLocal(torch.autograd.Function):
    """Return the local tensor, a view; the backward wraps its gradient."""

    @staticmethod
    def forward(ctx, x, grad_placements):
        ctx.cls, ctx.spec, ctx.grad_placements = type(x), x._spec, grad_placements
        ctx.set_materialize_grads(False)
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None
        spec = ctx.spec
        placements = ctx.grad_placements or gradient_placements(spec.placements)
        meta = spec.tensor_meta
        wrapped = ctx.cls.from_local(
            grad, spec.mesh, placements, shape=meta.shape, stride=meta.stride
        )
        return wrapped, None


class FromLocal(torch.autograd.Function):
    """Wrap a local tensor by a ragged spec; the backward returns the gradient's local part."""

    @staticmethod
    def forward(ctx, local, spec, grad_placements, run_check, cls):
        ctx.cls, ctx.shape = cls, local.shape
        ctx.placements = grad_placements or gradient_placements(spec.placements)
        ctx.set_materialize_grads(False)
        flat = local.reshape(-1).contiguous()
        if run_check:
            flat = _replicate_rank0(flat, spec)
        flat = flat.view_as(flat) if flat is local else flat
        return wrap(cls, flat, spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None, None, None, None
        grad = _ours(grad, ctx.cls)
        grad = _moved_back(grad, ctx.placements)
        return grad.to_local().reshape(ctx.shape), None, None, None, None


class FromTorch(torch.autograd.Function):
    """Return torch's own DTensor as class ``cls``; the backward returns torch's."""

    @staticmethod
    def forward(ctx, x, cls):
        ctx.placements = gradient_placements(x._spec.placements)
        ctx.set_materialize_grads(False)  # they would be plain tensors
        ctx.like = None
        if from_local_needs_gradient and not x.is_leaf:
            ctx.like = torch.empty_like(x._local_tensor, device="meta"), x.device, x._spec
        return wrap(cls, without_grad(x._local_tensor), x._spec, requires_grad=x.requires_grad)

    @staticmethod
    def backward(ctx, grad):
        if grad is None and ctx.like is not None:
            local, device, spec = ctx.like
            zeros = torch.zeros_like(local, device=device)
            return wrap(TorchDTensor, zeros, spec, requires_grad=False), None
        if grad is None or type(grad) is TorchDTensor:
            return grad, None
        if layout_of(grad._spec) is not None:  # from an operator with a ragged tensor
            grad = grad.redistribute(placements=ctx.placements)
        return AsTorch.apply(grad), None


class AsTorch(torch.autograd.Function):
    """Return our plain DTensor as torch's own class; the backward returns ours."""

    @staticmethod
    def forward(ctx, x):
        ctx.cls = type(x)
        ctx.set_materialize_grads(False)
        return wrap(TorchDTensor, x._local_tensor, x._spec, requires_grad=x.requires_grad)

    @staticmethod
    def backward(ctx, grad):
        return None if grad is None else _ours(grad, ctx.cls)


def _moved_back(grad: TorchDTensor, placements: tuple[Placement, ...]) -> TorchDTensor:
    """Return ``grad`` in placements that a tensor has already: they need no check on every rank."""
    if grad.placements == placements:
        return grad
    if ragged_axis(placements) is None:
        return grad.redistribute(placements=placements)
    return Redistribute.apply(grad, placements, None, None, False)


def without_grad(local: torch.Tensor) -> torch.Tensor:
    """Return ``local`` without a gradient: torch's ``distribute_tensor`` gives a part its own."""
    return local.detach() if local.requires_grad else local


def _ours(grad: TorchDTensor, cls: type) -> TorchDTensor:
    return FromTorch.apply(grad, cls) if type(grad) is TorchDTensor else grad


def from_local_ragged(
    cls: type,
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
):
    """Check and wrap a ragged local tensor; see ``DTensor.from_local``."""
    if isinstance(local, TorchDTensor):
        raise TypeError("from_local got a DTensor; pass its to_local(), or redistribute it.")
    if not local.is_meta and local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    if shape is None:
        shape = derive_shape(local, mesh, placements)
    spec = ragged_spec(mesh, placements, shape, local.dtype, stride)
    layout = layout_of(spec)
    if local.numel() != layout.numel:
        raise ValueError(
            f"the local tensor has shape {tuple(local.shape)}, {local.numel()} elements, but "
            f"{placements} gives this rank {layout.numel} elements of a tensor of shape "
            f"{tuple(shape)}; pass the flat part or a block of shape {layout.block_shape}."
        )
    if grad_placements is not None:
        grad_placements = normalize_placements(grad_placements, mesh, len(shape))
    return FromLocal.apply(local, spec, grad_placements, run_check, cls)


def derive_shape(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[int, ...]:
    """Return the global shape, if every rank can tell it alike from its ``local`` part."""
    axis = ragged_axis(placements)
    ragged: Any = placements[axis]
    if local.ndim == 1:
        raise ValueError(
            f"from_local got a flat part, {local.numel()} elements, which fits tensors of many "
            "shapes; pass shape=, such as shape=x.shape, or the part as rows, [rows, *shape[k:]]."
        )
    plain = all(p.is_replicate() or p.is_partial() for p in placements if p is not ragged)
    some_empty = not all(units for units, _ in ragged.runs)
    if not plain or ragged.dims != (0,) or some_empty or local.ndim == 0:
        raise ValueError(
            f"from_local cannot derive the global shape from the local one for {placements} on "
            "every rank alike; pass shape=."
        )
    _, units = locate(ragged.runs, mesh.get_local_rank(axis))
    if local.shape[0] % units:
        raise ValueError(
            f"the local tensor has {local.shape[0]} rows, which is not a multiple of this rank's "
            f"{units} units of {ragged}; pass shape= and the flat part."
        )
    return (local.shape[0] // units * total(ragged.runs), *local.shape[1:])


def _replicate_rank0(flat: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    flat = flat.clone()
    for axis, placement in enumerate(spec.placements):
        if placement == Replicate():
            dist.broadcast(flat, group_src=0, group=spec.mesh.get_group(axis))
    return flat
