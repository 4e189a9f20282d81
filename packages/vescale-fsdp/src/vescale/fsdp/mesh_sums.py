# SPDX-License-Identifier: Apache-2.0
"""Which process groups add up numbers that live on different meshes, each group at most once."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.fsdp.phases import waiting


@dataclass
class Home:
    """Where some tensors live: on ``mesh``, or as plain tensors (None).

    ``axes`` are the mesh axes to add over; their ranks hold different parts, or copies of which
    the first counts. ``groups`` and ``weight`` say how this home's number enters the total.
    """

    mesh: DeviceMesh | None
    axes: tuple[int, ...] = ()
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    weight: float = 1.0
    counts: bool = True  # for plain tensors: whether this rank's are the ones that count

    @property
    def inside(self) -> bool:
        """Whether this rank is in the mesh."""
        return self.mesh is not None and self.mesh.get_coordinate() is not None


def plan_sums(
    split_axes: dict[DeviceMesh | None, set[int]], copies: bool | None
) -> dict[DeviceMesh | None, Home]:
    """Choose groups for every mesh; ``split_axes`` are the axes that cut some tensor of it.

    The widest mesh carries the numbers of every mesh inside of it. ``copies`` says whether a
    narrower mesh holds the same tensors as its neighbours (count once) or others (count each);
    None decides: the same for a slice of the widest mesh, as beside tensor parallelism.
    """
    homes = {mesh: Home(mesh) for mesh in split_axes}
    meshes = [home.mesh for home in homes.values() if home.inside]
    if not meshes:
        return homes
    if len(homes) == 1:
        home = homes[meshes[0]]
        home.axes = tuple(sorted(split_axes[home.mesh]))
        home.groups = _groups(home.mesh, home.axes)
        return homes
    ranks = {mesh: frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}
    widest = max(meshes, key=lambda mesh: (len(ranks[mesh]), -mesh.ndim))
    shared = _groups(widest, range(widest.ndim))
    for mesh, home in homes.items():
        if mesh is None:
            home.groups, home.counts = shared, not any(widest.get_coordinate())
            continue
        home.axes = tuple(range(mesh.ndim))
        if not home.inside:
            continue
        if not ranks[mesh] <= ranks[widest]:
            home.groups = _groups(mesh, home.axes)
            continue
        home.groups = shared
        narrow = len(ranks[mesh]) < len(ranks[widest])
        if narrow and (_is_slice(mesh, widest) if copies is None else copies):
            home.weight = len(ranks[mesh]) / len(ranks[widest])
    return homes


def reduce_slots(
    values: list[torch.Tensor],
    groups: list[list[dist.ProcessGroup]],
    op: dist.ReduceOp.RedOpType,
    what: str,
) -> list[torch.Tensor]:
    """Return each ``values[i]``, 1-D, reduced over ``groups[i]``: one all-reduce for each group.

    ``what`` they are is told where it fails.
    """
    values = list(values)
    order: dict[Hashable, dist.ProcessGroup] = {
        group.group_name: group for slot in groups for group in slot
    }
    # Every rank goes from narrow to wide, so no two ranks wait for each other.
    for group in sorted(order.values(), key=lambda group: group.size()):
        if group.size() == 1:
            continue
        here = [index for index, slot in enumerate(groups) if group in slot]
        together = torch.cat([values[index] for index in here])
        with waiting(f"sum of {what} over ranks", group=group):
            dist.all_reduce(together, op=op, group=group)
        parts = together.split([values[index].numel() for index in here])
        for index, part in zip(here, parts, strict=True):
            values[index] = part
    return values


def _groups(mesh: DeviceMesh, axes: Sequence[int]) -> list[dist.ProcessGroup]:
    return [mesh.get_group(axis) for axis in axes]


def _is_slice(mesh: DeviceMesh, widest: DeviceMesh) -> bool:
    """Tell whether every axis of ``mesh`` is one of ``widest``."""
    wide = [dist.get_process_group_ranks(group) for group in _groups(widest, range(widest.ndim))]
    mine = _groups(mesh, range(mesh.ndim))
    return all(dist.get_process_group_ranks(group) in wide for group in mine)
