# SPDX-License-Identifier: Apache-2.0
"""Local and global shapes, by the old names."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale.legacy import _torch_compat as compat
from vescale.legacy._errors import LegacyValueError
from vescale.legacy.dtensor.normalize import normalize_placements
from vescale.legacy.dtensor.placement_types import (
    Placement,
    Shard,
    interleaved_size,
    is_interleaved_shard,
    is_sharded,
)

__all__ = [
    "check_interleaved",
    "compute_global_stride",
    "compute_global_tensor_info",
    "compute_local_offset",
    "compute_local_shape",
    "compute_local_shape_and_global_offset",
    "gather_local_tensor_shape",
    "is_zero_out_local_shard",
]


def compute_local_shape(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Return the shape of this rank's part."""
    return compute_local_shape_and_global_offset(global_shape, mesh, placements)[0]


def compute_local_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Return where this rank's part starts on each dim."""
    return compute_local_shape_and_global_offset(global_shape, mesh, placements)[1]


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset) of this rank's part, dims cut as ``torch.chunk`` does.

    A rank without elements has shape 0 and the global size as offset on that dim. A rank outside
    the mesh has ``((0,), ())``. The parts of an interleaved dim are not one piece: the offset is
    that of the first.
    """
    placements = normalize_placements(placements, mesh.ndim, tensor_ndim=len(global_shape))
    check_interleaved(global_shape, mesh, placements)
    shape, offset = compat.compute_local_shape_and_global_offset(
        torch.Size(global_shape), mesh, placements
    )
    return tuple(shape), tuple(_first(place) for place in offset)


def compute_global_tensor_info(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    meshdim_localtensor_shape: dict[int, list[Sequence[int]]] | None = None,
) -> tuple[list[int], list[int]]:
    """Return (shape, stride) of the whole tensor of which ``tensor`` is this rank's part.

    ``meshdim_localtensor_shape``, from ``gather_local_tensor_shape``, makes uneven parts exact;
    without it all parts are taken to be as large as this one.
    """
    shape = list(tensor.shape)
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if not is_sharded(placement):
            continue
        dim = placement.dim
        if meshdim_localtensor_shape is None:
            shape[dim] *= mesh.size(axis)
        else:  # what lies inside this part already counts in it
            inside = tensor.size(dim)
            total = sum(part[dim] for part in meshdim_localtensor_shape[axis])
            shape[dim] = shape[dim] * total // inside if inside else total
    return shape, _dense_stride(shape, tensor)


def compute_global_stride(
    local_tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Return the strides of the whole tensor, its parts being even."""
    return tuple(compute_global_tensor_info(local_tensor, mesh, placements)[1])


def gather_local_tensor_shape(
    self_local_tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    shard_only: bool = False,
) -> dict[int, list[torch.Size]] | None:
    """Return ``{mesh dim: shape of the part of each rank on it}``; one all-gather a mesh dim.

    With ``shard_only`` only mesh dims that cut a tensor dim are there. None outside the mesh.
    """
    if device_mesh.get_coordinate() is None:
        return None
    return {
        axis: _gather_shape(tuple(self_local_tensor.shape), device_mesh, axis)
        for axis in range(device_mesh.ndim)
        if not shard_only or is_sharded(placements[axis])
    }


def global_shape_of(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[torch.Size, tuple[int, ...]]:
    """Return (shape, stride) of the whole tensor, by one all-gather for each sharded axis.

    ``ValueError``, on all ranks of an axis alike, where parts are not as ``torch.chunk`` cuts.
    """
    shape = list(tensor.shape)
    for axis in reversed(range(mesh.ndim)):  # an inner axis first: its sum is a part of the outer
        placement = placements[axis]
        if not is_sharded(placement):
            continue
        dim = placement.dim
        parts = _gather_shape(tuple(shape), mesh, axis)
        sizes, total = [part[dim] for part in parts], sum(part[dim] for part in parts)
        if isinstance(placements[axis], Shard):
            count = len(sizes)
            expected = [Shard.local_shard_size_and_offset(total, count, r)[0] for r in range(count)]
        else:
            expected = [total // len(sizes)] * len(sizes)
        if sizes != expected:
            raise LegacyValueError(
                f"the ranks of mesh dim {axis} hold {sizes} on dim {dim} under "
                f"{placements[axis]}; {total} must be cut as torch.chunk does: {expected}."
            )
        shape[dim] = total
    return torch.Size(shape), tuple(_dense_stride(shape, tensor))


def is_zero_out_local_shard(mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Tell whether this rank holds the zeros of a value that is kept as partial sums."""
    place = mesh.get_coordinate()
    return place is not None and any(
        placement.is_partial() and place[axis] for axis, placement in enumerate(placements)
    )


def check_interleaved(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> None:
    """Raise ``ValueError`` unless every interleaved dim divides by pieces times ranks."""
    sizes = list(global_shape)
    for axis, placement in enumerate(placements):
        if not is_sharded(placement):
            continue
        dim, ranks = placement.dim, mesh.size(axis)
        if is_interleaved_shard(placement) and sizes[dim] % (interleaved_size(placement) * ranks):
            raise LegacyValueError(
                f"dim {dim} of shape {tuple(global_shape)} has {sizes[dim]} elements for mesh dim "
                f"{axis}, which {interleaved_size(placement)} pieces for {ranks} ranks do not "
                "divide; interleaved dims are cut evenly."
            )
        sizes[dim] = -(-sizes[dim] // ranks)


def _gather_shape(shape: tuple[int, ...], mesh: DeviceMesh, axis: int) -> list[torch.Size]:
    mine = torch.tensor(shape, dtype=torch.int64, device=mesh.device_type)
    found = mine.new_empty(mesh.size(axis) * len(shape))
    compat.all_gather_single(found, mine, group=mesh.get_group(axis))
    return [torch.Size(part) for part in found.view(mesh.size(axis), len(shape)).tolist()]


def _dense_stride(shape: Sequence[int], like: torch.Tensor) -> list[int]:
    """Return strides without gaps whose dims are in the order of those of ``like``."""
    order = sorted(range(len(shape)), key=lambda dim: (like.stride(dim), -dim))
    stride, step = [1] * len(shape), 1
    for dim in order:
        stride[dim] = step
        step *= max(shape[dim], 1)
    return stride


def _first(place: int | Sequence[int]) -> int:
    return int(place) if isinstance(place, int) else int(place[0])
