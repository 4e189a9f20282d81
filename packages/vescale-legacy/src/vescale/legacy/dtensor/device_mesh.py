# SPDX-License-Identifier: Apache-2.0
"""Torch's ``DeviceMesh``, and as functions the methods of the old one that it lacks."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale.legacy._errors import LegacyValueError
from vescale.legacy._torch_compat import mesh_without_groups

__all__ = [
    "DeviceMesh",
    "get_all_submesh",
    "get_dim_groups",
    "get_mapping_rank",
    "get_submesh",
    "init_device_mesh",
    "ndevice",
]


def ndevice(mesh: DeviceMesh) -> int:
    """Return how many ranks the mesh has."""
    return mesh.size()


def get_submesh(mesh: DeviceMesh, dims: int | str | Sequence[int | str]) -> DeviceMesh:
    """Return the child mesh over some dims, by index or name, that holds this rank.

    ``mesh`` must have names. ``KeyError`` for a name that it lacks.
    """
    named = [dims] if isinstance(dims, int | str) else list(dims)
    names = [_name(mesh, dim) for dim in named]
    return mesh[names[0] if len(names) == 1 else tuple(names)]


def get_all_submesh(mesh: DeviceMesh, dim: int | str) -> list[DeviceMesh]:
    """Return every 1-D child mesh along ``dim``.

    No collective: the child that holds this rank has its process group; others have none, and
    tell their ranks.
    """
    name = _name(mesh, dim)
    axis = mesh.mesh_dim_names.index(name)
    mine, rank = mesh[name], dist.get_rank()
    lines = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis))
    return [
        mine if bool((line == rank).any()) else mesh_without_groups(mesh.device_type, line, (name,))
        for line in lines
    ]


def get_mapping_rank(mesh: DeviceMesh, other: DeviceMesh) -> int | list[int] | dict[int, int]:
    """Return the rank or ranks of ``other`` at this rank's place, both meshes flattened.

    Same size: a rank. ``other`` larger by a factor f: f ranks. Smaller: ``{this rank: a rank}``.
    ``RuntimeError`` where neither size divides the other.
    """
    here, there = mesh.mesh.flatten().tolist(), other.mesh.flatten().tolist()
    if max(len(here), len(there)) % min(len(here), len(there)):
        raise RuntimeError(
            f"meshes of {len(here)} and {len(there)} ranks do not map on each other; one size "
            "must divide the other."
        )
    rank = dist.get_rank()
    if rank not in here:
        raise LegacyValueError(f"rank {rank} is not on {mesh}, which holds {here}.")
    place = here.index(rank)
    if len(there) == len(here):
        return there[place]
    if len(there) > len(here):
        factor = len(there) // len(here)
        return there[place * factor : (place + 1) * factor]
    return {rank: there[place // (len(here) // len(there))]}


def get_dim_groups(
    mesh: DeviceMesh, mesh_dim: int | str | None = None
) -> dist.ProcessGroup | list[dist.ProcessGroup]:
    """Return the group of one dim, or the list of all dims' groups."""
    return mesh.get_all_groups() if mesh_dim is None else mesh.get_group(mesh_dim)


def _name(mesh: DeviceMesh, dim: int | str) -> str:
    names = mesh.mesh_dim_names
    if not names:
        raise KeyError(f"{mesh} has no names for its dims; give mesh_dim_names when making it.")
    if isinstance(dim, int):
        return names[dim]
    if dim not in names:
        raise KeyError(f"{dim!r} is no dim of {mesh}; expected one of {list(names)}.")
    return dim
