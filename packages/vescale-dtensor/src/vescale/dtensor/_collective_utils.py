# SPDX-License-Identifier: Apache-2.0
"""``mesh_scatter_ragged`` by the import path of the first veScale."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor import comm

__all__ = ["mesh_scatter_ragged"]


def mesh_scatter_ragged(
    output: torch.Tensor,
    scatter_list: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    *,
    group_src: int = 0,
) -> None:
    """Fill ``output`` with this rank's tensor of ``scatter_list`` on rank ``group_src``.

    The tensors may have different shapes, and no elements; ``output`` has that of its own. Only
    the source's list is read. One all-to-all over mesh axis ``mesh_dim``, finished on return.

    Raises ValueError on the source when the list does not name one tensor for each rank.
    """
    if output.is_meta:
        return
    group, world_size = mesh.get_group(mesh_dim), mesh.size(mesh_dim)
    flat, send = output.new_empty(0), [0] * world_size
    if dist.get_rank(group) == group_src:
        if len(scatter_list) != world_size:
            raise ValueError(
                f"mesh_scatter_ragged got {len(scatter_list)} tensors for the {world_size} ranks "
                f"of mesh axis {mesh_dim}; give one per rank."
            )
        flat = torch.cat([part.reshape(-1) for part in scatter_list])
        send = [part.numel() for part in scatter_list]
    receive = [output.numel() if peer == group_src else 0 for peer in range(world_size)]
    output.copy_(comm.exchange(flat, send, receive, group).view(output.shape))
