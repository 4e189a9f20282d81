# SPDX-License-Identifier: Apache-2.0
"""Between plain tensors and DTensors: ``distribute_tensor``, ``from_local``, ``to_local``."""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as stock
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.legacy._errors import LegacyValueError
from vescale.legacy.dtensor._utils import (
    check_interleaved,
    compute_global_tensor_info,
    global_shape_of,
)
from vescale.legacy.dtensor.normalize import mesh_or_current, normalize_placements
from vescale.legacy.dtensor.placement_types import (
    Placement,
    Replicate,
    interleaved_size,
    is_interleaved_shard,
)
from vescale.legacy.dtensor.waiting import wait, wait_gradient

__all__ = ["distribute_tensor", "from_local", "to_local"]


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return the DTensor whose whole is ``tensor``, as the first rank of each mesh dim has it.

    Collective. Without placements: ``Replicate`` everywhere. Dims are cut as ``torch.chunk``
    does, so a rank may hold nothing. ``Partial``: coordinate 0 keeps the data and the others
    hold zeros. The result is a leaf on the mesh's device type, with ``tensor.requires_grad``.

    ``RuntimeError``: no mesh, or not a leaf (``distribute leaf tensors``). ``ValueError``: too
    many placements, an interleaved dim that does not divide, or a DTensor on another mesh (``to a
    different device mesh``) or with other placements; one that fits is returned as it is.
    """
    mesh = mesh_or_current(device_mesh)
    placements = normalize_placements(
        placements, mesh.ndim, tensor_ndim=tensor.ndim, none_as_replicate=True
    )
    check_interleaved(tensor.shape, mesh, placements)
    if isinstance(tensor, DTensor) or not any(p.is_partial() for p in placements):
        return stock.distribute_tensor(tensor, mesh, placements)
    whole = [Replicate() if p.is_partial() else p for p in placements]
    same: Any = stock.distribute_tensor(tensor, mesh, whole)
    local = keep_on_first(same.detach().to_local(), mesh, placements)
    out = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=same.shape, stride=same.stride()
    )
    out.requires_grad_(tensor.requires_grad)
    return out


def from_local(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = True,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    support_uneven: bool = True,
    async_input: bool = True,
) -> DTensor:
    """Return the DTensor of which ``local_tensor`` is this rank's part; they share memory.

    ``run_check`` writes the first rank's data over ``local_tensor`` on mesh dims that replicate
    (a broadcast each); ``VESCALE_DISABLE_RUN_CHECK=1`` turns it off. ``support_uneven`` gathers
    the sizes of all parts (an all-gather for each sharded mesh dim); without it they are taken
    to be equal. Neither runs when ``shape`` and ``stride`` of the whole are given, but the
    broadcast does. Outside the mesh the part is empty.

    Differentiable: the gradient is laid out as ``placements`` say, with ``Replicate`` for
    ``Partial``; ``async_input=False`` waits for it.

    ``RuntimeError``: no mesh given and ``No device mesh is currently active``. ``ValueError``:
    ``shape`` without ``stride``, parts that are not as ``torch.chunk`` cuts, or an interleaved
    part that does not divide.
    """
    mesh = mesh_or_current(device_mesh)
    placements = normalize_placements(
        placements, mesh.ndim, tensor_ndim=local_tensor.ndim, none_as_replicate=True
    )
    if (shape is None) != (stride is None):
        raise LegacyValueError(f"shape={shape}, stride={stride}: pass both shape and stride.")
    run_check = run_check and os.environ.get("VESCALE_DISABLE_RUN_CHECK", "0") != "1"
    inside = mesh.get_coordinate() is not None
    if local_tensor.device.type != mesh.device_type and not local_tensor.is_meta:
        local_tensor = local_tensor.to(mesh.device_type)
    if inside and run_check:
        _check_pieces(local_tensor, placements)
    if inside and shape is None:
        if support_uneven and not local_tensor.is_meta:
            shape, stride = global_shape_of(local_tensor, mesh, placements)
        else:
            shape, stride = compute_global_tensor_info(local_tensor, mesh, placements)
    if inside and run_check and not local_tensor.is_meta:
        local_tensor = _same_on_replicas(local_tensor, mesh, placements)
    if not async_input:
        local_tensor = wait_gradient(local_tensor)
    sizes: dict[str, Any] = {"shape": torch.Size(shape), "stride": tuple(stride)} if shape else {}
    return DTensor.from_local(local_tensor, mesh, placements, run_check=False, **sizes)


def to_local(
    dtensor: DTensor,
    *,
    grad_placements: Sequence[Placement] | None = None,
    async_output: bool = True,
) -> torch.Tensor:
    """Return this rank's part, which shares memory with ``dtensor``.

    Differentiable: its gradient is taken to be laid out as ``grad_placements``, by default as
    ``dtensor`` is, with ``Replicate`` for ``Partial``. With ``async_output`` the part may be one
    that waits for its data when first used; else it is plain.
    """
    grad_placements = normalize_placements(
        grad_placements, dtensor.device_mesh.ndim, tensor_ndim=dtensor.ndim
    )
    local = dtensor.to_local(grad_placements=grad_placements)
    return local if async_output else wait(local)


def keep_on_first(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """Return ``local`` where this rank is first on every partial axis, elsewhere what adds nothing.

    That is zeros for a sum, ones for a product, and ``local`` for an average or an extreme.
    """
    place = mesh.get_coordinate()
    partial = [axis for axis, placement in enumerate(placements) if placement.is_partial()]
    if place is None or not any(place[axis] for axis in partial):
        return local
    term: Any = placements[partial[0]]
    op = term.reduce_op  # torch allows one for a tensor
    if op in ("sum", "product"):
        return torch.full_like(local, 0 if op == "sum" else 1)
    return local  # the average, maximum or minimum of a value repeated


def _same_on_replicas(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    axes = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    if not axes:
        return local
    local = local.contiguous()
    data = local.detach()  # the values that autograd saved are replaced too: on every rank alike
    for axis in axes:
        dist.broadcast(data, group=mesh.get_group(axis), group_src=0)
    return local


def _check_pieces(local: torch.Tensor, placements: Sequence[Placement]) -> None:
    for placement in placements:
        if not is_interleaved_shard(placement):
            continue
        if local.size(placement.dim) % interleaved_size(placement):
            raise LegacyValueError(
                f"a part of {local.size(placement.dim)} elements on dim {placement.dim} does not "
                f"divide into the {interleaved_size(placement)} pieces of {placement}."
            )
