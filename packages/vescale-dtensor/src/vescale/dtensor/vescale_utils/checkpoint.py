# SPDX-License-Identifier: Apache-2.0
"""``_break_ragged_box`` by the import path of the first veScale."""

from collections.abc import Sequence

from vescale.dtensor.layout import boxes_of_range
from vescale.dtensor.vescale_utils import flatten_index

Sizes = list[tuple[int, ...]]


def _break_ragged_box(
    ragged_sizes: Sequence[int],
    ragged_offsets: Sequence[int],
    ragged_dims: Sequence[int],
    unragged_tensor_shape: Sequence[int],
    original_tensor_shape: Sequence[int],
    global_offsets: Sequence[int],
) -> tuple[Sizes, Sizes]:
    """Return (sizes, offsets) of boxes of the whole tensor that cover one box of a ragged tensor.

    In ``ragged_sizes`` and ``ragged_offsets`` the consecutive ``ragged_dims`` are one dim,
    flattened; offsets count from the whole tensor's beginning. ``unragged_tensor_shape`` at
    ``global_offsets`` is the block that other placements leave of ``original_tensor_shape``.
    Boxes are in storage order when the ragged dims come first, and the dims behind them are whole.
    """
    if not ragged_offsets:  # nothing on this rank
        return [], []
    first, last = ragged_dims[0], ragged_dims[-1] + 1
    block = unragged_tensor_shape[first:last]
    corner = global_offsets[first:last]
    start = ragged_offsets[first] - flatten_index(corner, original_tensor_shape[first:last])
    sizes, offsets = [], []
    for box in boxes_of_range(start, start + ragged_sizes[first], block):
        offset = tuple(map(sum, zip(box.offset, corner, strict=True)))
        sizes.append((*ragged_sizes[:first], *box.shape, *ragged_sizes[first + 1 :]))
        offsets.append((*ragged_offsets[:first], *offset, *ragged_offsets[first + 1 :]))
    return sizes, offsets
