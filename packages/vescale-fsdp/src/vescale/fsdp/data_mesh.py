# SPDX-License-Identifier: Apache-2.0
"""The data-parallel mesh of one parameter group: which axis shards, and which one repeats."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from vescale.fsdp._torch_compat import concatenate_meshes, flatten_mesh
from vescale.fsdp.policy import DataParallelMeshDims

# By the process group that they are part of, and their number of ranks. Weak: a process group that
# is destroyed and made anew is another one, of the same name and ranks.
_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class DataMesh:
    """A mesh of one or two axes: ``shard_axis`` cuts the parameters, ``replicate_axis`` repeats.

    Without a ``shard_axis`` every rank holds whole parameters, and a plan is one for one rank.
    Axes that were picked ``within`` a larger mesh have the ``names`` there. Compared by value.
    """

    mesh: DeviceMesh
    shard_axis: int | None = 0
    replicate_axis: int | None = None
    within: DeviceMesh | None = None
    names: tuple[str, ...] = ()

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The process group of this rank along the sharding axis; None without one."""
        return None if self.shard_axis is None else self.mesh.get_group(self.shard_axis)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The process group of this rank along the replicating axis; None without one."""
        return None if self.replicate_axis is None else self.mesh.get_group(self.replicate_axis)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that connect all ranks of the mesh, the sharding one first."""
        return [g for g in (self.shard_group, self.replicate_group) if g is not None]

    @property
    def shards(self) -> int:
        """Over how many ranks a parameter is cut."""
        return 1 if self.shard_axis is None else self.mesh.size(self.shard_axis)

    @property
    def replicas(self) -> int:
        """How many ranks hold the same part of a parameter."""
        return 1 if self.replicate_axis is None else self.mesh.size(self.replicate_axis)

    @property
    def ranks(self) -> int:
        """How many ranks a gradient is averaged over."""
        return self.shards * self.replicas

    def subgroup(self, size: int) -> dist.ProcessGroup:
        """Return the group of ``size`` neighbours on the sharding axis that this rank is one of.

        ``size`` divides ``shards``. Made on first use, when all its ranks must call this, and
        shared from then on.
        """
        whole: Any = self.shard_group
        known = _subgroups.setdefault(whole, {})
        if size not in known:
            first = whole.rank() // size * size
            ranks = dist.get_process_group_ranks(whole)[first : first + size]
            known[size] = dist.new_group(ranks, use_local_synchronization=True)
        return known[size]

    def placements(self, cut: Placement) -> tuple[Placement, ...]:
        """Return the placements, one per axis of the mesh, of a parameter that is ``cut`` so."""
        return tuple(
            cut if axis == self.shard_axis else Replicate() for axis in range(self.mesh.ndim)
        )


def data_mesh_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> DataMesh:
    """Return how a mesh of one axis (shard) or two (replicate, shard) is used.

    ``dims`` picks the axes by name from a mesh of any; several under one of its fields become one
    axis, in the order of the mesh. Raises ValueError for another number of axes, or for ``dims``
    that do not fit the mesh.
    """
    if dims is not None:
        return _picked(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh has {mesh.ndim} axes {tuple(mesh.shape)}, expected 1 (shard) or 2 (replicate, "
            "shard); pass the axes of data parallelism, such as mesh['replicate', 'shard'], or "
            "name them with dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)."
        )
    return DataMesh(mesh) if mesh.ndim == 1 else DataMesh(mesh, shard_axis=1, replicate_axis=0)


def _picked(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataMesh:
    shard, replicate = _names_of(mesh, dims.shard), _names_of(mesh, dims.replicate)
    names = (*replicate, *shard)
    known = mesh.mesh_dim_names or ()
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise ValueError(
            f"dp_mesh_dims={dims} picks the axes {names} of a mesh with the axes {known}; name "
            "axes that it has, each once, for shard, for replicate, or for both."
        )
    if not shard:
        data = _axis(mesh, replicate)
        return DataMesh(data, shard_axis=None, replicate_axis=0, within=mesh, names=names)
    if not replicate:
        return DataMesh(_axis(mesh, shard), within=mesh, names=names)
    data = concatenate_meshes(_axis(mesh, replicate), _axis(mesh, shard))
    return DataMesh(data, shard_axis=1, replicate_axis=0, within=mesh, names=names)


def _names_of(mesh: DeviceMesh, names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    names = (names,) if isinstance(names, str) else tuple(names)
    known = mesh.mesh_dim_names or ()
    return tuple(sorted(names, key=lambda name: known.index(name) if name in known else -1))


def _axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    part = mesh[names]
    return part if part.ndim == 1 else flatten_mesh(part)
