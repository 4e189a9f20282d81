# SPDX-License-Identifier: Apache-2.0
"""The local part of an operand, in the layout of the ragged tensor it meets."""

import math
from collections.abc import Iterable
from typing import NoReturn

import torch

from vescale.dtensor._torch_compat import (
    TorchDTensor,
    implicit_replication_enabled,
    wrap,
)
from vescale.dtensor.layout import Layout
from vescale.dtensor.spec import (
    base_placements,
    check_is_ours,
    layout_of,
    make_spec,
    spec_with_dtype,
)

# Words only: this package knows nothing of the other.
USUAL_CAUSES = (
    " Usual causes: an optimizer that needs whole tensors, such as torch.optim.Muon (instead: "
    "vescale.fsdp.optim.Muon) or Adafactor; a parameter of a module under fully_shard used outside "
    "of its forward (call the module, register_fsdp_forward_method, or unshard()); or "
    "DistributedDataParallel around such a module, which averages its gradients itself (leave it "
    "out; a 2-D mesh for fully_shard makes replicas)."
)
OF_FULLY_SHARD = (
    " Of a parameter under fully_shard, full_tensor() is the whole, a collective and a copy; "
    "to_local() is this rank's part, flat; and while its module's unshard() lasts the parameter is "
    "an ordinary tensor."
)


def unsupported(func, reason: str, *tensors: object, hint: str = "") -> NoReturn:
    """Raise NotImplementedError naming the operator, the placements and the remedy."""
    placements = [str(x._spec.placements) for x in tensors if isinstance(x, TorchDTensor)]
    raise NotImplementedError(
        f"{func} on {', '.join(placements)}: {reason}; redistribute to Replicate or Shard first, "
        f"or take full_tensor().{hint}"
    )


def mixed(func, plain: torch.Tensor, ref: TorchDTensor) -> NoReturn:
    """Raise NotImplementedError for a plain tensor beside a ragged one, with the remedies."""
    raise NotImplementedError(
        f"{func} mixes a plain tensor of shape {tuple(plain.shape)} with a DTensor of "
        f"{ref._spec.placements}; distribute_tensor or DTensor.from_local makes a DTensor of it, "
        "vescale.dtensor.state.load_full_state_dict loads whole states of models and optimizers, "
        "and torch.distributed.tensor.experimental.implicit_replication() lets operators read a "
        f"plain tensor that is the same on every rank.{OF_FULLY_SHARD}"
    )


def checked_dims(dims: Iterable[int], ndim: int) -> list[int]:
    """Return ``dims`` counted from the front; without dims 0 and -1 are valid, as in torch.

    Raises IndexError for a dim out of range, RuntimeError for one that is named twice.
    """
    dims, reach = list(dims), max(ndim, 1)
    for dim in dims:
        if not -reach <= dim < reach:
            raise IndexError(
                f"dimension {dim} is out of range for a tensor of {ndim} dims; give one from "
                f"{-reach} to {reach - 1}."
            )
    found = [dim % reach for dim in dims]
    if len(set(found)) < len(found):
        raise RuntimeError(f"dims {dims} of a tensor of {ndim} dims name one twice; give it once.")
    return found


def alike(mine, its) -> bool:
    """Tell at once whether two specs place tensors of one shape alike; False may be wrong."""
    return (
        mine.mesh is its.mesh
        and mine.tensor_meta.shape == its.tensor_meta.shape
        and mine.placements == its.placements
    )


def same_layout(a: TorchDTensor, b: TorchDTensor) -> bool:
    """Tell whether two tensors, ``b`` ragged, are cut alike, so that their local parts match."""
    check_is_ours(a)
    mine, its = a._spec, b._spec
    if mine is its or alike(mine, its):
        return True
    x, y = layout_of(mine), layout_of(its)
    if x is None or (x is not y and not _same_cut(x, y)):
        return False
    if mine.tensor_meta.shape != its.tensor_meta.shape or mine.mesh != its.mesh:
        return False
    return base_placements(mine.placements) == base_placements(its.placements)


def _same_cut(x: Layout, y: Layout) -> bool:
    """Compare the ranges of all ranks: every rank must come to the same answer."""
    return x.axis == y.axis and x.base_shape == y.base_shape and x.split_runs == y.split_runs


def _same_rows(a: TorchDTensor, b: TorchDTensor) -> bool:
    """Tell whether ``a`` broadcasts to ``b`` inside rows that both cut alike."""
    x, y = layout_of(a._spec), layout_of(b._spec)
    k = len(x.placement.dims)
    return (
        k > 0
        and a._spec.placements == b._spec.placements
        and a._spec.mesh == b._spec.mesh
        and a.ndim == b.ndim
        and a.shape[:k] == b.shape[:k]
        and all(mine in (1, its) for mine, its in zip(x.base_shape, y.base_shape, strict=True))
    )


def local_operand(func, a: object, ref: TorchDTensor) -> object:
    """Return the local part of operand ``a`` in the layout of ``ref``; scalars as they are.

    Without communication: raises NotImplementedError where some would be needed.
    """
    if isinstance(a, TorchDTensor):
        if a._spec is ref._spec or same_layout(a, ref):
            return a._local_tensor
        if layout_of(a._spec) is not None:
            if not _same_rows(a, ref):
                _cut_differently(func, a, ref)
            block = a._local_tensor.view(layout_of(a._spec).block_shape)
            return block.expand(layout_of(ref._spec).block_shape).reshape(-1)
        if a._spec.mesh != ref._spec.mesh:
            unsupported(func, "the operands are on different meshes", ref, a)
        if not all(placement.is_replicate() for placement in a._spec.placements):
            _cut_differently(func, a, ref)
        return a._local_tensor if a.ndim == 0 else slice_of(func, a._local_tensor, ref)
    if isinstance(a, torch.Tensor) and a.ndim > 0:
        if a.numel() != 1 and not implicit_replication_enabled():
            mixed(func, a, ref)
        return slice_of(func, a, ref)
    return a


def _cut_differently(func, a: TorchDTensor, ref: TorchDTensor) -> NoReturn:
    how = "cut" if layout_of(a._spec) is not None else "placed"
    raise NotImplementedError(
        f"{func} on {ref._spec.placements}, {a._spec.placements}: the operands are {how} "
        "differently; redistribute one to the placements of the other, as in "
        "y.redistribute(placements=x.placements)."
    )


def slice_of(func, whole: torch.Tensor, ref: TorchDTensor) -> torch.Tensor:
    """Return this rank's flat part of ``whole``, broadcast to the shape of ``ref``."""
    shape, layout = ref._spec.tensor_meta.shape, layout_of(ref._spec)
    padded = (1,) * (len(shape) - whole.ndim) + tuple(whole.shape)
    if len(padded) != len(shape) or any(
        length not in (1, full) for length, full in zip(padded, shape, strict=True)
    ):
        unsupported(func, f"shape {tuple(whole.shape)} would broadcast {tuple(shape)}", ref)
    block = whole.expand(shape)
    if layout.base_shape != tuple(shape):
        block = block[
            tuple(
                slice(start, start + length)
                for start, length in zip(layout.base_offset, layout.base_shape, strict=True)
            )
        ]
    if not layout.base_shape:
        return block.reshape(-1)[layout.start : layout.end]
    # Only the rows in reach: flattening a broadcast block copies it.
    row_numel = math.prod(layout.base_shape[1:])
    first = layout.start // row_numel if row_numel else 0
    last = -(-layout.end // row_numel) if row_numel else 0
    flat = block[first:last].reshape(-1)
    return flat[layout.start - first * row_numel : layout.end - first * row_numel]


def result_like(func, args, ref: TorchDTensor) -> TorchDTensor:
    """Return a stand-in for the result of operands of several shapes: only its spec counts.

    Inside whole rows an operand may be repeated, ``ref`` too; the rows are never.
    """
    spec, k = ref._spec, len(layout_of(ref._spec).placement.dims)
    shape = torch.broadcast_shapes(*(a.shape for a in args if isinstance(a, torch.Tensor)))
    if shape == ref.shape:
        return ref
    grown = [dim for dim in range(ref.ndim) if shape[dim - ref.ndim] != ref.shape[dim]]
    if len(shape) != ref.ndim or not k or grown[0] < k or _shards(spec, grown):
        unsupported(func, f"shape {tuple(ref.shape)} would be repeated to {tuple(shape)}", ref)
    wide = make_spec(spec.mesh, spec.placements, shape, spec.tensor_meta.dtype)
    return wrap(type(ref), ref._local_tensor, wide, requires_grad=False)


def _shards(spec, dims) -> bool:
    return any(placement.is_shard() and placement.dim in dims for placement in spec.placements)


def rewrap(out: torch.Tensor, ref: TorchDTensor) -> TorchDTensor:
    """Return the local result ``out`` as a tensor laid out like ``ref``, with ``out``'s dtype."""
    spec = ref._spec
    if out.dtype is not spec.tensor_meta.dtype:
        spec = spec_with_dtype(spec, out.dtype)
    return wrap(type(ref), out, spec, requires_grad=False)
