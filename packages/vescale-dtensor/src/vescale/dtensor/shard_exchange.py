# SPDX-License-Identifier: Apache-2.0
"""One all-to-all between a ragged cut and a ``Shard`` of any dim, over the same mesh axis.

Both cut the same block. Restricting the row-major order of a block to a chunk of one dim gives
the row-major order of the chunk, so on the side of the chunk every peer's part is one contiguous
piece, in rank order. Only the ragged side packs, box by box.
"""

import torch
import torch.distributed as dist

from vescale.dtensor import comm
from vescale.dtensor.layout import Layout, boxes_of_range, chunk_numels, pieces_by_chunk


def ragged_to_shard(
    local: torch.Tensor, layout: Layout, dim: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return this rank's chunk along ``dim`` of the block; ``local`` is its flat ragged part."""
    lengths = _chunk_lengths(layout, dim)
    mine = _views(local, layout, dim, lengths)
    send = [sum(view.numel() for view in views) for views in mine]
    packed = [view.reshape(-1) for views in mine for view in views]
    flat = torch.cat(packed) if packed and dim else local  # along dim 0 the order is the same
    rank = dist.get_rank(group)
    chunk = comm.exchange(flat, send, _numels_in_chunk(layout, dim, lengths, rank), group)
    shape = (*layout.base_shape[:dim], lengths[rank], *layout.base_shape[dim + 1 :])
    return chunk.view(shape)


def shard_to_ragged(
    local: torch.Tensor, layout: Layout, dim: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return this rank's flat ragged part; ``local`` is its chunk along ``dim`` of the block."""
    lengths, rank = _chunk_lengths(layout, dim), dist.get_rank(group)
    out = local.new_empty(layout.numel)
    views = _views(out, layout, dim, lengths)
    receive = [sum(view.numel() for view in group_) for group_ in views]
    send = _numels_in_chunk(layout, dim, lengths, rank)
    received = comm.exchange(local.reshape(-1), send, receive, group)
    if dim == 0:  # chunks of whole rows follow each other as ragged parts do
        return received
    targets = [view for group_ in views for view in group_]
    parts = received.split([view.numel() for view in targets])
    for view, part in zip(targets, parts, strict=True):
        view.copy_(part.view(view.shape))
    return out


def _chunk_lengths(layout: Layout, dim: int) -> tuple[int, ...]:
    return chunk_numels(layout.base_shape[dim], len(layout.placement.local_units))


def _views(
    flat: torch.Tensor, layout: Layout, dim: int, lengths: tuple[int, ...]
) -> list[list[torch.Tensor]]:
    """Return, for every rank's chunk, the views of this rank's ``flat`` part that lie in it."""
    boxes = list(boxes_of_range(layout.start, layout.end, layout.base_shape))
    return [
        [
            flat[box.start : box.start + box.numel].view(box.shape).narrow(dim, start, length)
            for box, start, length in pieces
        ]
        for pieces in pieces_by_chunk(boxes, dim, lengths)
    ]


def _numels_in_chunk(layout: Layout, dim: int, lengths: tuple[int, ...], rank: int) -> list[int]:
    """Return how many elements of every rank's ragged part lie in the chunk of ``rank``."""
    counts, end = [], 0
    only_mine = [sum(lengths[:rank]), lengths[rank]]  # what lies before it, and the chunk
    for numel in layout.split_numels:
        start, end = end, end + numel
        boxes = list(boxes_of_range(start, end, layout.base_shape))
        pieces = pieces_by_chunk(boxes, dim, only_mine)[1]
        counts.append(sum(box.numel // box.shape[dim] * length for box, _, length in pieces))
    return counts
