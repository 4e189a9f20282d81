# SPDX-License-Identifier: Apache-2.0
"""The data-parallel mesh of one parameter group: which axis shards, and which one repeats."""

import weakref
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

# By the process group that they are part of, and their number of ranks. Weak: a process group that
# is destroyed and made anew is another one, of the same name and ranks.
_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class DataMesh:
    """A mesh of one or two axes: ``shard_axis`` cuts the parameters, ``replicate_axis`` repeats.

    Without a ``shard_axis`` every rank holds whole parameters, and a plan is one for one rank.
    Compared by its mesh and axes.
    """

    mesh: DeviceMesh
    shard_axis: int | None = 0
    replicate_axis: int | None = None

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
        whole = self.shard_group
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


def data_mesh_of(mesh: DeviceMesh) -> DataMesh:
    """Return how a mesh of one axis (shard) or two (replicate, shard) is used."""
    return DataMesh(mesh) if mesh.ndim == 1 else DataMesh(mesh, shard_axis=1, replicate_axis=0)
