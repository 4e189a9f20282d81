# SPDX-License-Identifier: Apache-2.0
"""Reduce a ragged tensor over all or some of its dims.

Over all dims: one local reduction and one all-reduce per mesh axis; the result is replicated.
Over dims inside whole rows: no communication; the result is ragged like the input. Over other
dims: each rank reduces the boxes it holds into a result of full size, and one all-reduce per mesh
axis combines them; the result is replicated there. Half types are summed in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale.dtensor import comm
from vescale.dtensor._torch_compat import DTensorSpec, TorchDTensor, wrap
from vescale.dtensor.layout import boxes_of_range
from vescale.dtensor.spec import layout_of, make_spec, replicated_spec


@dataclass(frozen=True, slots=True)
class Reduction:
    """How to reduce, on one rank and between ranks.

    ``local`` takes (tensor, dims), keeps the dims and returns ``dtype``; ``op`` combines ranks;
    ``finish`` maps the combined values to the result.
    """

    local: Callable[[torch.Tensor, Any], torch.Tensor]
    op: str
    dtype: torch.dtype
    finish: Callable[[torch.Tensor], torch.Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums and norms of ``dtype`` are formed and sent."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def split_axes(spec: DTensorSpec) -> list[int]:
    """Return the mesh axes whose ranks hold different parts of the tensor."""
    placements = spec.placements
    if len(placements) == 1:  # asked once per parameter of a list
        return [] if placements[0].is_replicate() else [0]
    return [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]


def groups_of(mesh: DeviceMesh, axes: Sequence[int]) -> list[dist.ProcessGroup]:
    """Return this rank's groups along ``axes``; none where it is not in the mesh."""
    return [] if mesh.get_coordinate() is None else [mesh.get_group(axis) for axis in axes]


def reduce(
    ref: TorchDTensor, dims: Sequence[int] | None, keepdim: bool, reduction: Reduction
) -> TorchDTensor:
    """Return ``ref`` reduced over ``dims`` (None or empty: all of them)."""
    dims = sorted({dim % ref.ndim for dim in dims}) if dims and ref.ndim else range(ref.ndim)
    if len(dims) == ref.ndim:
        return _reduce_all(ref, keepdim, reduction)
    spec, layout = ref._spec, layout_of(ref._spec)
    first_inner = len(layout.placement.dims)
    crossed = [
        axis
        for axis, placement in enumerate(spec.placements)
        if type(placement) is Shard and placement.dim in dims
    ]
    if first_inner and not crossed and dims[0] >= first_inner:
        block = ref._local_tensor.view(layout.block_shape)
        local = reduction.local(block, [dim - first_inner + 1 for dim in dims])
        local = reduction.finish(local.reshape(-1))
    else:
        crossed = sorted([*crossed, layout.axis])
        groups = groups_of(spec.mesh, crossed)
        local = reduction.finish(combine(_reduce_boxes(ref, dims, reduction), reduction.op, groups))
        if not keepdim:
            local = local.squeeze(tuple(dims))
    placements = [
        Replicate() if axis in crossed else placement
        for axis, placement in enumerate(spec.placements)
    ]
    shape = [1 if dim in dims else length for dim, length in enumerate(ref.shape)]
    if not keepdim:
        placements = [_renumber(placement, dims) for placement in placements]
        shape = [length for dim, length in enumerate(shape) if dim not in dims]
    new = make_spec(spec.mesh, placements, shape, local.dtype)
    return wrap(type(ref), local, new, requires_grad=False)


def combine(value: torch.Tensor, op: str, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """Reduce ``value`` over every group, in place where it can be.

    "max" and "min" of floating point values carry a flag in the same message, so that a NaN
    anywhere makes the result NaN: backends differ in what theirs do with it.
    """
    if value.is_meta:
        return value
    if op not in ("max", "min") or not value.is_floating_point():
        for group in groups:
            value = comm.all_reduce(value, op, group)
        return value
    nan, sign = value.isnan(), (1.0 if op == "max" else -1.0)
    both = torch.stack([value.masked_fill(nan, -sign * float("inf")), nan.to(value.dtype) * sign])
    for group in groups:
        both = comm.all_reduce(both, op, group)
    return both[0].masked_fill_(both[1] != 0, float("nan"))


def _reduce_all(ref: TorchDTensor, keepdim: bool, reduction: Reduction) -> TorchDTensor:
    spec, local = ref._spec, ref._local_tensor
    if local.numel():
        value = reduction.local(local, [0]).view(())
    else:
        value = _neutral(local, (), reduction)
    groups = groups_of(spec.mesh, split_axes(spec))
    value = reduction.finish(combine(value, reduction.op, groups))
    if keepdim:
        value = value.view((1,) * ref.ndim)
    new = replicated_spec(spec, value.shape, value.stride(), value.dtype)
    return wrap(type(ref), value, new, requires_grad=False)


def _reduce_boxes(ref: TorchDTensor, dims: Sequence[int], reduction: Reduction) -> torch.Tensor:
    """Return this rank's share of the result: the base's shape with ``dims`` of length 1."""
    layout, local = layout_of(ref._spec), ref._local_tensor
    shape = [1 if dim in dims else length for dim, length in enumerate(layout.base_shape)]
    out = _neutral(local, shape, reduction)
    for box in boxes_of_range(layout.start, layout.end, layout.base_shape):
        part = local[box.start : box.start + box.numel].view(box.shape)
        place = out[
            tuple(
                slice(0, 1) if dim in dims else slice(start, start + length)
                for dim, (start, length) in enumerate(zip(box.offset, box.shape, strict=True))
            )
        ]
        place.copy_(_PAIRWISE[reduction.op](place, reduction.local(part, dims)))
    return out


def _neutral(local: torch.Tensor, shape: Sequence[int], reduction: Reduction) -> torch.Tensor:
    value: float = {"sum": 0, "product": 1}.get(reduction.op, -1 if reduction.op == "max" else 1)
    if reduction.op in ("max", "min"):
        if reduction.dtype.is_floating_point:
            value *= float("inf")
        else:
            info = torch.iinfo(reduction.dtype)
            value = info.min if reduction.op == "max" else info.max
    return local.new_full(shape, value, dtype=reduction.dtype)


def _renumber(placement: Placement, dims: Sequence[int]) -> Placement:
    if type(placement) is not Shard:
        return placement
    return Shard(placement.dim - sum(dim < placement.dim for dim in dims))


_PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
