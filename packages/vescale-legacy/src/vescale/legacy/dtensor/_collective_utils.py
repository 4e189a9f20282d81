# SPDX-License-Identifier: Apache-2.0
"""Collectives along one dim of a mesh, by the old names.

Ranks outside the mesh return None, or leave what they were given as it is. With ``async_op`` a
``torch.distributed.Work`` to wait for is returned.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from vescale.legacy._errors import LegacyValueError
from vescale.legacy._torch_compat import all_gather_single, reduce_scatter_single
from vescale.legacy.dtensor.waiting import wait

__all__ = [
    "mesh_all_gather",
    "mesh_all_reduce",
    "mesh_all_to_all",
    "mesh_all_to_all_single",
    "mesh_broadcast",
    "mesh_reduce_scatter",
    "mesh_scatter",
    "mesh_wait",
    "wait",
]


def mesh_broadcast(
    tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int = 0, async_op: bool = False
) -> Any:
    """Write the first rank's ``tensor`` over those of the others."""
    if _outside(mesh):
        return None
    return dist.broadcast(tensor, group=mesh.get_group(mesh_dim), group_src=0, async_op=async_op)


def mesh_scatter(
    output: torch.Tensor,
    scatter_list: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
) -> Any:
    """Fill ``output`` with this rank's tensor of the first rank's list, all of one shape."""
    if _outside(mesh):
        return None
    first = mesh.get_local_rank(mesh_dim) == 0
    sources = [part.contiguous() for part in scatter_list] if first else None
    group = mesh.get_group(mesh_dim)
    return dist.scatter(output, sources, group=group, group_src=0, async_op=async_op)


def mesh_all_gather(
    tensor: torch.Tensor,
    global_size: Sequence[int],
    mesh: DeviceMesh,
    scatter_dim: int,
    mesh_dim: int,
) -> torch.Tensor | None:
    """Return the tensor of ``global_size`` whose part on ``scatter_dim`` each rank gives.

    Parts are as ``torch.chunk`` cuts, so they may be uneven or empty.
    """
    if _outside(mesh):
        return None
    ranks, total = mesh.size(mesh_dim), global_size[scatter_dim]
    longest = -(-total // ranks)
    mine = _padded(tensor.movedim(scatter_dim, 0), longest)
    found = mine.new_empty((ranks * longest, *mine.shape[1:]))
    all_gather_single(found, mine, group=mesh.get_group(mesh_dim))
    return found[:total].movedim(0, scatter_dim).contiguous()  # only the last parts are short


def mesh_reduce_scatter(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    reduce_op: Any,
    scatter_dim: int,
    mesh_dim: int,
) -> torch.Tensor | None:
    """Return this rank's part, cut on ``scatter_dim`` as ``torch.chunk`` does, of the reduction."""
    if _outside(mesh):
        return None
    ranks, total = mesh.size(mesh_dim), tensor.size(scatter_dim)
    longest = -(-total // ranks)
    given = _padded(tensor.movedim(scatter_dim, 0), ranks * longest)
    mine = given.new_empty((longest, *given.shape[1:]))
    group = mesh.get_group(mesh_dim)
    reduce_scatter_single(mine, given, op=_reduce_op(reduce_op), group=group)
    size, _ = Shard.local_shard_size_and_offset(total, ranks, mesh.get_local_rank(mesh_dim))
    return mine[:size].movedim(0, scatter_dim).contiguous()


def mesh_all_reduce(
    tensor: torch.Tensor, mesh: DeviceMesh, reduce_op: Any, mesh_dim: int
) -> torch.Tensor | None:
    """Return the reduction of all ranks' ``tensor``, which stays as it is."""
    if _outside(mesh):
        return None
    out = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=_reduce_op(reduce_op), group=mesh.get_group(mesh_dim))
    return out


def mesh_all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
) -> Any:
    """Send tensor i of the input list to rank i, and fill the output list with what arrives.

    Shapes may differ. The lists travel as one flat tensor, which gloo can do too, and the outputs
    are filled on return: with ``async_op`` the result is None as well.
    """
    if _outside(mesh):
        return None
    for name, tensors in (("output", output_tensor_list), ("input", input_tensor_list)):
        if len(tensors) != mesh.size(mesh_dim):
            raise LegacyValueError(
                f"{len(tensors)} {name} tensors for the {mesh.size(mesh_dim)} ranks of mesh dim "
                f"{mesh_dim}; give one per rank."
            )
    send = torch.cat([part.reshape(-1) for part in input_tensor_list])
    sizes = [part.numel() for part in output_tensor_list]
    found = send.new_empty(sum(sizes))
    given = [part.numel() for part in input_tensor_list]
    dist.all_to_all_single(found, send, sizes, given, group=mesh.get_group(mesh_dim))
    for out, part in zip(output_tensor_list, found.split(sizes), strict=True):
        out.copy_(part.view(out.shape))
    return None


def mesh_all_to_all_single(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    original_shard_dim: int,
    target_shard_dim: int,
    mesh_dim: int = 0,
    async_op: bool = False,
) -> torch.Tensor | None:
    """Return this rank's part cut on ``target_shard_dim`` of a tensor cut on another dim.

    Parts are even, ``target_shard_dim`` divides by the ranks, and the result is there on return
    whatever ``async_op`` says. ``ValueError``: fewer than 2 dims, one dim twice, or an uneven cut.
    """
    if _outside(mesh):
        return None
    ranks = mesh.size(mesh_dim)
    old, new = original_shard_dim % max(tensor.ndim, 1), target_shard_dim % max(tensor.ndim, 1)
    if tensor.ndim < 2 or old == new or tensor.size(new) % ranks:
        raise LegacyValueError(
            f"a part of shape {tuple(tensor.shape)} cannot move its cut from dim "
            f"{original_shard_dim} to {target_shard_dim} over {ranks} ranks; expected two dims of "
            "at least 2, the second divided by the ranks."
        )
    pieces = [piece.contiguous() for piece in tensor.chunk(ranks, new)]
    arrived = [torch.empty_like(piece) for piece in pieces]
    mesh_all_to_all(arrived, pieces, mesh, mesh_dim)
    return torch.cat(arrived, old)


def _outside(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is None


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - tensor.size(0)
    if missing == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


def _reduce_op(op: Any) -> Any:
    return getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op


def mesh_wait(tensor: torch.Tensor, mesh: DeviceMesh | None = None, mesh_dim: int = 0) -> Any:
    """Return ``tensor`` with its data there, whatever collective it comes from; see ``wait``."""
    return wait(tensor)
