# SPDX-License-Identifier: Apache-2.0
"""Views that keep the row-major order: the local tensor is the same, the shape is another."""

import math

import torch

from vescale.dtensor._torch_compat import wrap
from vescale.dtensor.ops.operands import checked_dims, unsupported
from vescale.dtensor.placement import RaggedShard
from vescale.dtensor.spec import layout_of, make_spec, replace

aten = torch.ops.aten


def view_as_shape(func, ref, shape):
    """Return ``ref`` seen as ``shape``, over the same local memory.

    The ranges of all ranks stay; the dims they cut are named anew: as many as before if whole
    rows of the new shape fit, else the fewest that do.
    """
    spec, layout, shape = ref._spec, layout_of(ref._spec), tuple(shape)
    local = ref._local_tensor.view(-1)
    if shape == tuple(spec.tensor_meta.shape):
        return wrap(type(ref), local, spec, requires_grad=False)
    if math.prod(shape) != ref.numel():
        raise ValueError(f"{func}: shape {shape} does not hold the {ref.numel()} elements of {ref}")
    if layout.base_shape != tuple(spec.tensor_meta.shape) or any(
        placement.is_shard() for placement in spec.placements
    ):
        unsupported(func, f"the view {shape} mixes with the Shard of another mesh axis", ref)
    ragged = RaggedShard.from_runs(_cut_dims(layout, shape), layout.placement.runs)
    placements = replace(spec.placements, layout.axis, ragged)
    new = make_spec(spec.mesh, placements, shape, spec.tensor_meta.dtype)
    return wrap(type(ref), local, new, requires_grad=False)


def _cut_dims(layout, shape):
    old = len(layout.placement.dims)
    if layout.placement.owner is not None:
        return tuple(range(min(old, len(shape))))
    unit = layout.placement.unit_numel(layout.base_shape)
    fits = [k for k in range(1, len(shape) + 1) if _holds(unit, math.prod(shape[k:]))]
    return tuple(range(old if old in fits else fits[0]))


def _holds(unit: int, row_numel: int) -> bool:
    return unit % row_numel == 0 if row_numel else unit == 0


def _view(func, args, kwargs, ref):
    size = list(args[1])
    if size.count(-1) > 1 or any(length < -1 for length in size):
        raise RuntimeError(
            f"{func} got shape {size}; give lengths, with -1 for at most one to be derived."
        )
    if -1 in size and 0 in size:
        raise RuntimeError(f"{func} got shape {size}: -1 can be any length beside 0; give it.")
    if -1 in size:
        size[size.index(-1)] = ref.numel() // -math.prod(size)
    return view_as_shape(func, ref, size)


def _unsqueeze(func, args, kwargs, ref):
    shape = list(ref.shape)
    (dim,) = checked_dims([args[1]], ref.ndim + 1)
    shape.insert(dim, 1)
    return view_as_shape(func, ref, shape)


def _squeeze(func, args, kwargs, ref):
    dims = args[1] if len(args) > 1 else range(ref.ndim)
    dims = checked_dims([dims] if isinstance(dims, int) else dims, ref.ndim)
    return view_as_shape(
        func, ref, [n for dim, n in enumerate(ref.shape) if n != 1 or dim not in dims]
    )


def _expand(func, args, kwargs, ref):
    """Repeat dims of length 1 inside whole rows; the result is a copy, not a view."""
    spec, layout = ref._spec, layout_of(ref._spec)
    size = tuple(args[1])
    added = len(size) - ref.ndim
    shape = [old if n == -1 else n for n, old in zip(size[added:], ref.shape, strict=True)]
    grown = [dim for dim, (n, old) in enumerate(zip(shape, ref.shape, strict=True)) if n != old]
    if not grown and not added:
        return view_as_shape(func, ref, ref.shape)
    first_inner = len(layout.placement.dims)
    if added or not first_inner or grown[0] < first_inner or _shards(spec, grown):
        unsupported(func, f"shape {tuple(ref.shape)} would be repeated to {size}", ref)
    block = list(layout.block_shape)
    for dim in grown:
        block[dim - first_inner + 1] = shape[dim]
    local = ref._local_tensor.view(layout.block_shape).expand(block).reshape(-1)
    new = make_spec(spec.mesh, spec.placements, shape, local.dtype)
    return wrap(type(ref), local, new, requires_grad=False)


def _shards(spec, dims):
    return any(placement.is_shard() and placement.dim in dims for placement in spec.placements)


VIEWS = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
}
