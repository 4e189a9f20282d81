# SPDX-License-Identifier: Apache-2.0
"""Bring placements to one form: a tuple with one entry for each axis of the mesh."""

import warnings
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from vescale.legacy._torch_compat import current_mesh
from vescale.legacy.dtensor.placement_types import (
    InterleavedShard,
    Placement,
    Replicate,
    Shard,
    interleaved_size,
    is_interleaved_shard,
    is_sharded,
)

__all__ = ["mesh_or_current", "normalize_placements"]


def normalize_placements(
    placements: Sequence[Placement] | None,
    mesh_ndim: int,
    *,
    tensor_ndim: int = 0,
    none_as_replicate: bool = False,
) -> tuple[Placement, ...] | None:
    """Return ``mesh_ndim`` placements: short ones end in ``Replicate``, with a ``UserWarning``.

    None stays None, or becomes all ``Replicate`` with ``none_as_replicate``. With
    ``tensor_ndim`` a negative dim counts from the end. ``ValueError``: too many entries, an
    entry that is no placement, a dim that the tensor does not have.
    """
    if placements is None:
        return (Replicate(),) * mesh_ndim if none_as_replicate else None
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise ValueError(f"{placements!r}: expected a list of placements, one per mesh dim.")
    for placement in placements:
        if not isinstance(placement, Placement):
            raise ValueError(f"{placement!r} in {list(placements)} is no Placement.")
    if len(placements) > mesh_ndim:
        raise ValueError(
            f"{list(placements)} has {len(placements)} placements for a mesh of {mesh_ndim} "
            "dims; give one per mesh dim."
        )
    if len(placements) < mesh_ndim:
        warnings.warn(
            f"{list(placements)} is shorter than the mesh, of {mesh_ndim} dims; the rest is "
            "taken as Replicate().",
            stacklevel=2,
        )
    padded = (*placements, *[Replicate()] * (mesh_ndim - len(placements)))
    return tuple(_wrapped(placement, tensor_ndim) for placement in padded)


def mesh_or_current(device_mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh given, or that of the active ``with mesh:``; else ``RuntimeError``."""
    return current_mesh() if device_mesh is None else device_mesh


def _wrapped(placement: Placement, tensor_ndim: int) -> Placement:
    if not tensor_ndim or not is_sharded(placement):
        return placement
    if not -tensor_ndim <= placement.dim < tensor_ndim:
        raise ValueError(f"{placement} names a dim that a tensor of {tensor_ndim} dims lacks.")
    if placement.dim >= 0:
        return placement
    dim = placement.dim + tensor_ndim
    if is_interleaved_shard(placement):
        return InterleavedShard(dim, interleaved_size(placement))
    return Shard(dim)
