# SPDX-License-Identifier: Apache-2.0
"""Make distributed tensors: from a whole tensor, or filled."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from vescale.dtensor import comm
from vescale.dtensor._torch_compat import TorchDTensor, current_mesh
from vescale.dtensor.layout import chunk_numels
from vescale.dtensor.spec import layout_of, normalize_placements, ragged_axis, ragged_spec
from vescale.dtensor.tensor import DTensor, adopt, make_ragged


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a whole tensor, which every rank passes with the same shape and dtype.

    Only the values of ``src_data_rank`` count, a rank of each mesh axis: one collective per axis
    sends every rank its part. ``src_data_rank=None`` takes each rank's own values and does not
    communicate. The result does not share memory with ``tensor``; it is a leaf with its
    ``requires_grad``, and an ``nn.Parameter`` stays none.

    Raises ValueError when the placements do not fit the mesh or the shape.
    """
    mesh = device_mesh or current_mesh()
    placements = normalize_placements(placements, mesh, tensor.ndim)
    if ragged_axis(placements) is None:
        if isinstance(tensor, DTensor):
            tensor = tensor.as_torch()
        return adopt(torch_distribute_tensor(tensor, mesh, placements, src_data_rank=src_data_rank))
    if isinstance(tensor, TorchDTensor):
        raise ValueError(
            f"distribute_tensor got a DTensor of {tensor.placements}; use redistribute() to move "
            f"it to {placements}."
        )
    if not tensor.is_leaf:
        raise ValueError(
            "distribute_tensor takes leaf tensors and does not record a gradient; use "
            "DTensor.from_local and redistribute() inside a graph."
        )
    spec = ragged_spec(mesh, placements, tensor.shape, tensor.dtype)
    layout, whole = layout_of(spec), tensor.detach()
    if not whole.is_meta and whole.device.type != mesh.device_type:
        whole = whole.to(mesh.device_type)
    if mesh.get_coordinate() is None or whole.is_meta:
        local = whole.new_empty(layout.numel)
    else:
        for axis, placement in enumerate(placements):
            if axis != layout.axis:
                whole = _distribute_axis(whole, mesh, axis, placement, src_data_rank)
        flat = whole.reshape(-1)
        if src_data_rank is None:
            local = flat[layout.start : layout.end].clone()
        else:
            group = mesh.get_group(layout.axis)
            local = comm.scatter(flat, layout.split_numels, src_data_rank, group)
    return make_ragged(local, spec, tensor.requires_grad)


def _distribute_axis(
    whole: torch.Tensor, mesh: DeviceMesh, axis: int, placement: Placement, source: int | None
) -> torch.Tensor:
    """Apply one plain placement to ``whole`` (what the axes before have left)."""
    group, rank = mesh.get_group(axis), mesh.get_local_rank(axis)
    if isinstance(placement, Shard):
        lengths = chunk_numels(whole.shape[placement.dim], mesh.size(axis))
        parts = whole.split(lengths, placement.dim)
        if source is None:
            return parts[rank]
        flat = torch.cat([part.reshape(-1) for part in parts])
        received = comm.scatter(flat, [part.numel() for part in parts], source, group)
        return received.view(parts[rank].shape)
    if not isinstance(placement, Replicate):
        raise NotImplementedError(
            f"distribute_tensor cannot make {placement} next to a RaggedShard; use Replicate or "
            "Shard there."
        )
    return whole if source is None else comm.broadcast(whole, source, group)
