# SPDX-License-Identifier: Apache-2.0
"""Parameters that another mesh axis cuts before the data axis: tensor and expert parallelism.

Such a parameter comes as torch's DTensor on a mesh of its own. Its local part is what the data
axis divides and gathers; the module computes with torch's DTensor on that mesh again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from vescale.fsdp._torch_compat import concatenate_meshes


@dataclass(frozen=True)
class Parallel:
    """How a parameter lies on its own mesh: its DTensor without the data.

    ``whole_mesh`` has the data axes and, after them, those of ``mesh``; ``shape`` is that of the
    whole parameter.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    whole_mesh: DeviceMesh

    @property
    def uneven(self) -> bool:
        """Whether the ranks of the mesh hold local parts of different shapes."""
        parts = [1] * len(self.shape)
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                parts[placement.dim] *= self.mesh.size(axis)
        return any(length % count for length, count in zip(self.shape, parts, strict=True))

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Return torch's DTensor over this rank's part; a view of ``local``, not recorded."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a gradient, laid out as the parameter.

        Collective over the mesh where its placements differ, as after a Partial result.
        """
        if not isinstance(grad, DTensor):
            return grad
        with torch.no_grad():
            if grad.placements != self.placements:
                grad = grad.redistribute(placements=self.placements)
            return grad.to_local()


def parallel_of(
    fqn: str,
    param: torch.Tensor,
    data_mesh: DeviceMesh,
    whole_meshes: dict[tuple[DeviceMesh, DeviceMesh], DeviceMesh],
) -> Parallel | None:
    """Return how ``param`` lies on a mesh of its own, or None for a plain tensor.

    ``whole_meshes`` keeps the meshes made so far, so that equal ones are the same object. Raises
    ValueError unless both meshes are different axes of one mesh that this rank is in, and
    NotImplementedError for placements that cannot be cut once more.
    """
    if not isinstance(param, DTensor):
        return None
    mesh, placements = param.device_mesh, tuple(param.placements)
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{fqn} is a DTensor on {mesh}, which this rank is not part of; wrap on the ranks of "
            "the mesh only."
        )
    if not all(type(placement) in (Shard, Replicate) for placement in placements):
        advice = "Redistribute it to Shard or Replicate before fully_shard."
        if any(isinstance(placement, Partial) for placement in placements):
            advice = "Its values are sums that nobody formed yet; redistribute it to Replicate."
        raise NotImplementedError(
            f"{fqn} is a DTensor of placements {placements}, which cannot be sharded further. "
            f"{advice}"
        )
    shape = param.shape
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    strides = tuple(max(1, stride) for stride in strides)  # the gathered parts are row-major
    if (data_mesh, mesh) not in whole_meshes:
        whole_meshes[data_mesh, mesh] = _whole_mesh(fqn, data_mesh, mesh)
    return Parallel(mesh, placements, shape, strides, whole_meshes[data_mesh, mesh])


def _whole_mesh(fqn: str, data_mesh: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    what = (
        f"{fqn} is a DTensor on {mesh} and is to be sharded over {data_mesh}; both must be "
        "different axes of one mesh with names, such as mesh['dp'] and mesh['tp'] of "
        "init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))"
    )
    if data_mesh.mesh_dim_names is None or mesh.mesh_dim_names is None:
        raise ValueError(f"{what}; one of them has no names.")
    try:
        return concatenate_meshes(data_mesh, mesh)
    except RuntimeError as error:
        raise ValueError(f"{what}: {error}") from error


def parallel_meshes(params: Sequence[torch.Tensor]) -> list[DeviceMesh]:
    """Return the meshes that ``params`` are DTensors on and this rank is in, each once."""
    meshes: list[DeviceMesh] = []
    for param in params:
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        if mesh is not None and mesh not in meshes and mesh.get_coordinate() is not None:
            meshes.append(mesh)
    return meshes
