# SPDX-License-Identifier: Apache-2.0
"""Read from a parameter's placements how its memory is divided between ranks."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from vescale.dtensor.layout import chunk_runs
from vescale.dtensor.placement import is_ragged_shard
from vescale.dtensor.runs import Runs


@dataclass(frozen=True, slots=True)
class Cut:
    """Contiguous parts of a tensor's row-major memory, in the order of the group's ranks.

    ``runs`` are pairs ``(numel, ranks)``: so many elements on each of the next ``ranks`` ranks.
    ``device`` is where ``group`` communicates: the shard's own device, or the accelerator when the
    shard is offloaded to the CPU. ``axis`` is the mesh axis that the group is of.
    ``replica_group`` are the ranks of the first mesh axis that replicates over more than one, which
    hold the same parts.
    """

    axis: int
    group: dist.ProcessGroup
    runs: Runs
    device: torch.device
    replica_group: dist.ProcessGroup | None = None


def read_cut(param: torch.Tensor, label: str) -> Cut | None:
    """Return how ``param`` is cut, or None when this rank holds all of it.

    Whole on every rank: plain tensors, Replicate on every mesh axis, and any cut over an axis of
    one rank. Cut: RaggedShard or Shard(0) on one axis, Replicate on the others. ``label`` names
    the parameter in errors.

    Raises NotImplementedError for any other placement.
    """
    if not isinstance(param, DTensor):
        return None
    mesh, placements = param.device_mesh, param.placements
    axes = [
        axis
        for axis, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]
    if not axes and not any(placement.is_partial() for placement in placements):
        return None
    runs = _runs(placements[axes[0]], param.shape, mesh.size(axes[0])) if axes else None
    if len(axes) != 1 or runs is None:
        raise NotImplementedError(
            f"{label} has placements {tuple(placements)} on a mesh of shape {tuple(mesh.shape)}; "
            "expected RaggedShard or Shard(0) on one mesh axis and Replicate on the others. "
            "Redistribute the parameter, or leave it to another optimizer."
        )
    copies = [
        axis
        for axis, placement in enumerate(placements)
        if placement.is_replicate() and mesh.size(axis) > 1
    ]
    replicas = mesh.get_group(copies[0]) if copies else None
    return Cut(axes[0], mesh.get_group(axes[0]), runs, _group_device(param), replicas)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself; a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _runs(placement: Any, shape: torch.Size, world_size: int) -> Runs | None:
    if is_ragged_shard(placement):
        return placement.split_runs(shape)
    if type(placement) is Shard and placement.dim == 0:
        return chunk_runs(shape[0], world_size, math.prod(shape[1:]))
    return None


def _group_device(param: DTensor) -> torch.device:
    device, kind = param.to_local().device, param.device_mesh.device_type
    if device.type == kind:
        return device
    return torch.device(kind, torch.get_device_module(kind).current_device())
