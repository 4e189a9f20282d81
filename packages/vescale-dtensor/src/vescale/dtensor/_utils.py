# SPDX-License-Identifier: Apache-2.0
"""Local and global shapes by the import path of the first veScale."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from vescale.dtensor import _torch_compat as compat
from vescale.dtensor.autograd import derive_shape
from vescale.dtensor.layout import contiguous_stride
from vescale.dtensor.spec import layout_of, normalize_placements, ragged_axis, ragged_spec
from vescale.dtensor.vescale_utils import flatten_index

__all__ = ["compute_global_tensor_info", "compute_local_shape_and_global_offset"]


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (local shape, offset in the whole tensor) of this rank.

    Under a ragged placement the dims that it cuts count as one, flattened: the shape is
    ``(rows, *shape[k:])``, and the offset counts rows from the first of the whole tensor's. A
    rank that holds nothing has ``((0,), ())``.
    """
    placements = normalize_placements(placements, mesh, len(global_shape))
    if ragged_axis(placements) is None:
        return compat.compute_local_shape_and_global_offset(
            torch.Size(global_shape), mesh, placements
        )
    layout = layout_of(ragged_spec(mesh, placements, global_shape, torch.get_default_dtype()))
    if layout.numel == 0:
        return (0,), ()
    k, offset = len(layout.placement.dims), layout.base_offset
    if k == 0:
        return layout.base_shape, offset
    rows, *rest = layout.block_shape
    first = layout.start // (layout.numel // rows) + flatten_index(offset[:k], global_shape[:k])
    return (rows, *rest), (first, *offset[k:])


def compute_global_tensor_info(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """Return (shape, strides) of the whole tensor of which ``tensor`` is this rank's part.

    Raises ValueError where ranks could come to different answers; see ``DTensor.from_local``.
    """
    placements = tuple(placements)
    if ragged_axis(placements) is None:
        shape, stride = compat.compute_global_tensor_info(tensor, mesh, placements)
        return list(shape), list(stride)
    sizes = derive_shape(tensor, mesh, placements)
    return list(sizes), list(contiguous_stride(sizes))
