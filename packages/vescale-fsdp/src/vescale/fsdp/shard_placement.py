# SPDX-License-Identifier: Apache-2.0
"""FSDP2's ``shard_placement_fn``: on which mesh each parameter is sharded.

FSDP2 also chooses the dim to cut there, since it pads every parameter to equal chunks of that dim.
Here a cut wastes nothing on any dim, so a dim is checked and otherwise left alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from vescale.fsdp.data_mesh import DataMesh

PlacementFn = Callable[[nn.Parameter], Any]

_EXPECTED = (
    "expected None, Shard(dim), or a ShardPlacementResult(placement, mesh_info) whose mesh_info "
    "has mesh, shard_mesh_dim and replicate_mesh_dim"
)


def check_placement_fn(placement_fn: Any) -> None:
    """Raise TypeError unless ``placement_fn`` is None or can be called."""
    if placement_fn is not None and not callable(placement_fn):
        raise TypeError(
            f"shard_placement_fn is {placement_fn!r}, expected a function of one parameter; it "
            "returns Shard(dim), None or a ShardPlacementResult."
        )


def data_mesh_for(
    placement_fn: PlacementFn | None, fqn: str, param: nn.Parameter, data: DataMesh
) -> DataMesh:
    """Return the data mesh that ``placement_fn`` wants for ``param``; ``data`` is the default.

    Raises TypeError or ValueError, naming the parameter, for any other answer than FSDP2 takes.
    """
    if placement_fn is None:
        return data
    answer = placement_fn(param)
    if hasattr(answer, "mesh_info") and hasattr(answer, "placement"):
        _check_dim(fqn, param, answer.placement, answer)
        return _data_mesh(fqn, answer.mesh_info, data)
    _check_dim(fqn, param, answer, answer)
    return data


def _check_dim(fqn: str, param: torch.Tensor, placement: Any, answer: Any) -> None:
    if placement is None:
        return
    if type(placement) is not Shard:
        raise TypeError(f"{fqn}: shard_placement_fn returned {answer!r}, {_EXPECTED}.")
    if not -param.ndim <= placement.dim < max(param.ndim, 1):
        raise ValueError(
            f"{fqn}: shard_placement_fn returned {answer!r}, but the parameter has {param.ndim} "
            "dims; return a dim that it has, or None."
        )


def _data_mesh(fqn: str, info: Any, data: DataMesh) -> DataMesh:
    mesh = getattr(info, "mesh", None)
    shard, replicate = (
        getattr(info, name, None) for name in ("shard_mesh_dim", "replicate_mesh_dim")
    )
    where = f"{fqn}: the mesh_info that shard_placement_fn returned"
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{where} is {info!r}; {_EXPECTED}.")
    axes = sorted(axis for axis in (shard, replicate) if axis is not None)
    if axes != list(range(mesh.ndim)):
        raise ValueError(
            f"{where} has shard_mesh_dim={shard} and replicate_mesh_dim={replicate} for a mesh of "
            f"{mesh.ndim} axes; each axis has to shard or to replicate, and only one can do each."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{where} has {mesh}, which this rank is not in; return a mesh that is.")
    if mesh.device_type != data.mesh.device_type:
        raise ValueError(
            f"{where} has a mesh of {mesh.device_type} devices, but fully_shard got one of "
            f"{data.mesh.device_type}; use one device type."
        )
    return DataMesh(mesh, shard_axis=shard, replicate_axis=replicate)
