# SPDX-License-Identifier: Apache-2.0
"""Small helpers by the import path of the first veScale.

New code needs none of them: ``DTensor.local_block`` and ``vescale.dtensor.layout`` do the same.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from vescale.dtensor._torch_compat import DTensorSpec
from vescale.dtensor.placement import RaggedShard
from vescale.dtensor.spec import base_placements, layout_of, make_spec, ragged_axis

__all__ = [
    "best_effort_reshape",
    "cvt_inclusive_to_exclusive",
    "flatten_index",
    "get_ragged_shard",
    "get_unflattened_dims",
    "get_unflattened_shape_and_offset_before_ragged_shard",
    "get_unflattened_shape_and_offset_before_ragged_shard_",
    "retrieve_flattened_index_before_ragged_shard",
    "substitute_ragged_with_replicate",
    "unravel_index",
]


def unravel_index(idx: int, shape: Sequence[int]) -> list[int]:
    """Return the index of each dim of the ``idx``-th element, row-major, of ``shape``."""
    index = []
    for length in reversed(shape):
        idx, here = divmod(idx, length)
        index.append(here)
    return index[::-1]


def flatten_index(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return how many elements come before ``index`` in the row-major order of ``shape``.

    Raises ValueError when the lengths differ, IndexError when an index is out of bounds.
    """
    if len(index) != len(shape):
        raise ValueError(f"index {tuple(index)} has not the dims of shape {tuple(shape)}.")
    flat = 0
    for here, length in zip(index, shape, strict=True):
        if not 0 <= here < length:
            raise IndexError(f"index {tuple(index)} is out of bounds for shape {tuple(shape)}.")
        flat = flat * length + here
    return flat


def cvt_inclusive_to_exclusive(
    inclusive_end_coord: Sequence[int], flattened_shape: Sequence[int]
) -> list[int]:
    """Return the index of the element after ``inclusive_end_coord``; after the last it is one
    beyond the first dim. Raises like ``flatten_index``."""
    after = flatten_index(inclusive_end_coord, flattened_shape) + 1
    first, inner = divmod(after, math.prod(flattened_shape[1:]))
    return [first, *unravel_index(inner, flattened_shape[1:])]


def get_ragged_shard(placements: Sequence[Placement]) -> tuple[int, RaggedShard]:
    """Return (mesh axis, placement) of the RaggedShard; ValueError when there is not one."""
    axis = ragged_axis(placements)
    if axis is None:
        raise ValueError(f"no RaggedShard among the placements {tuple(placements)}.")
    ragged: Any = placements[axis]
    return axis, ragged


def substitute_ragged_with_replicate(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return ``placements`` with Replicate for the RaggedShard; ValueError when there is none."""
    get_ragged_shard(placements)
    return base_placements(placements)


def best_effort_reshape(tensor: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Return ``tensor``, flat and in whole rows of ``spec``, as ``[rows, *shape[k:]]``, a view.

    ``shape`` is what the other placements leave on this rank.
    """
    _, placement = get_ragged_shard(spec.placements)
    row_shape = layout_of(spec).base_shape[len(placement.dims) :]
    row_numel = math.prod(row_shape)
    return tensor.view(tensor.numel() // row_numel if row_numel else 0, *row_shape)


def get_unflattened_dims(spec: DTensorSpec) -> tuple[int, ...]:
    """Return the dims that the ragged cut leaves whole: those behind its own."""
    _, placement = get_ragged_shard(spec.placements)
    return tuple(range(len(placement.dims), len(spec.tensor_meta.shape)))


def get_unflattened_shape_and_offset_before_ragged_shard(
    spec: DTensorSpec,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset) of the block that the placements beside the ragged one leave here."""
    get_ragged_shard(spec.placements)
    layout = layout_of(spec)
    return layout.base_shape, layout.base_offset


def get_unflattened_shape_and_offset_before_ragged_shard_(
    shape: Sequence[int], device_mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the same as its twin without the last underscore, for no spec yet."""
    get_ragged_shard(placements)
    spec = make_spec(device_mesh, placements, shape, torch.get_default_dtype())
    return get_unflattened_shape_and_offset_before_ragged_shard(spec)


def retrieve_flattened_index_before_ragged_shard(spec: DTensorSpec) -> tuple[int, int]:
    """Return this rank's range ``[start, end)``, in elements of that block, flattened."""
    get_ragged_shard(spec.placements)
    layout = layout_of(spec)
    return layout.start, layout.end
