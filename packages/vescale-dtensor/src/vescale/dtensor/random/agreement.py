# SPDX-License-Identifier: Apache-2.0
"""Do all ranks have the same seed?"""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def check_agreement(seed: object, mesh: DeviceMesh | None) -> None:
    """Raise ValueError, on every rank of ``mesh`` (default: of the job), unless seeds are equal.

    Collective; without a process group there is nothing to compare.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    found = {dist.get_rank(): seed}
    groups = [dist.group.WORLD]
    if mesh is not None:
        if mesh.get_coordinate() is None:
            return
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    for group in groups:  # after the last axis all have heard of all
        everyones: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyones, found, group=group)
        found = {rank: theirs for some in everyones for rank, theirs in some.items()}
    first = min(found)
    other = [rank for rank in sorted(found) if found[rank] != found[first]]
    if other:
        raise ValueError(
            f"manual_seed got seed {found[first]!r} on rank {first} and {found[other[0]]!r} on "
            f"rank {other[0]}; pass the same seed on every rank: a rank's part of a tensor is "
            "chosen by its place, not by its seed."
        )
