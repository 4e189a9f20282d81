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
from vescale.fsdp.data_mesh import DataMesh


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
    data_axes: tuple[int, ...] = ()  # of ``mesh``, if that includes them

    @property
    def other_placements(self) -> tuple[Placement, ...]:
        """The placements on the axes of ``mesh`` that are not of data parallelism."""
        axes = enumerate(self.placements)
        return tuple(placement for axis, placement in axes if axis not in self.data_axes)

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

        Collective over the mesh where its placements differ, as after a Partial result. On data
        axes a Partial one stays: it will be reduced over them.
        """
        if not isinstance(grad, DTensor):
            return grad
        placements = tuple(
            own if axis in self.data_axes and own.is_partial() else wanted
            for axis, (own, wanted) in enumerate(zip(grad.placements, self.placements, strict=True))
        )
        with torch.no_grad():
            if grad.placements != placements:
                grad = grad.redistribute(placements=placements)
            return grad.to_local()


def parallel_of(
    fqn: str,
    param: torch.Tensor,
    data: DataMesh,
    whole_meshes: dict[tuple[DeviceMesh, DeviceMesh], DeviceMesh],
) -> Parallel | None:
    """Return how ``param`` lies on a mesh of its own, or None for a plain tensor.

    ``whole_meshes`` keeps the meshes made so far, so that equal ones are the same object. Raises
    ValueError unless both meshes are different axes of one mesh that this rank is in, or the
    parameter is replicated on the data axes of its mesh; and NotImplementedError for placements
    that cannot be cut once more.
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
    row_major = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # as gathered parts are
    strides = tuple(max(1, stride) for stride in row_major)
    data_axes = _data_axes(fqn, placements, mesh, data)
    if (data.mesh, mesh) not in whole_meshes:
        others = [mesh.mesh_dim_names[i] for i in range(mesh.ndim) if i not in data_axes]
        other = mesh[tuple(others)] if data_axes and others else mesh
        whole_meshes[data.mesh, mesh] = _whole_mesh(fqn, data.mesh, other) if others else data.mesh
    whole_mesh = whole_meshes[data.mesh, mesh]
    return Parallel(mesh, placements, shape, strides, whole_mesh, data_axes)


def _data_axes(
    fqn: str, placements: tuple[Placement, ...], mesh: DeviceMesh, data: DataMesh
) -> tuple[int, ...]:
    """Return which axes of ``mesh`` are those of data parallelism, picked from it by name."""
    if data.within is None or mesh != data.within:
        return ()
    axes = tuple(mesh.mesh_dim_names.index(name) for name in data.names)
    for axis in axes:
        if not placements[axis].is_replicate():
            raise ValueError(
                f"{fqn} is a DTensor of placements {placements}, and on the axis "
                f"{mesh.mesh_dim_names[axis]!r} of data parallelism {placements[axis]}, expected "
                "Replicate(); fully_shard cuts it there."
            )
    return axes


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
