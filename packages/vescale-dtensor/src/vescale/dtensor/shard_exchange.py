# SPDX-License-Identifier: Apache-2.0
"""One all-to-all between a ragged cut and a ``Shard`` of any dim, over the same mesh axis.

Both cut the same block. Restricting the row-major order of a block to a chunk of one dim gives
the row-major order of the chunk, so on the side of the chunk every peer's part is one contiguous
piece, in rank order. Only the ragged side packs, box by box.
"""

from collections.abc import Callable

import torch

from vescale.dtensor.layout import Layout, boxes_of_range, chunk_numels, pieces_by_chunk

Step = Callable[[torch.Tensor], torch.Tensor]
Exchange = tuple[tuple[int, ...], tuple[int, ...], Step, Step]


def ragged_to_shard(layout: Layout, dim: int, rank: int) -> Exchange:
    """Return (send, receive, pack, unpack) from a flat ragged part to chunks along ``dim``.

    ``send`` and ``receive`` count elements for and from every rank of the axis.
    """
    lengths = _chunk_lengths(layout, dim)
    send = tuple(_numel(pieces, dim) for pieces in _pieces(layout, dim, lengths))
    shape = (*layout.base_shape[:dim], lengths[rank], *layout.base_shape[dim + 1 :])

    def pack(local: torch.Tensor) -> torch.Tensor:
        views = [view for views in _views(local, layout, dim, lengths) for view in views]
        # Along dim 0 the order is the same.
        return torch.cat([view.reshape(-1) for view in views]) if views and dim else local

    receive = _numels_in_chunk(layout, dim, lengths, rank)
    return send, receive, pack, lambda flat: flat.view(shape)


def shard_to_ragged(layout: Layout, dim: int, rank: int) -> Exchange:
    """Return (send, receive, pack, unpack) from chunks along ``dim`` to a flat ragged part."""
    lengths = _chunk_lengths(layout, dim)
    receive = tuple(_numel(pieces, dim) for pieces in _pieces(layout, dim, lengths))

    def unpack(received: torch.Tensor) -> torch.Tensor:
        if dim == 0:  # chunks of whole rows follow each other as ragged parts do
            return received
        out = received.new_empty(layout.numel)
        targets = [view for views in _views(out, layout, dim, lengths) for view in views]
        parts = received.split([view.numel() for view in targets])
        for view, part in zip(targets, parts, strict=True):
            view.copy_(part.view(view.shape))
        return out

    send = _numels_in_chunk(layout, dim, lengths, rank)
    return send, receive, lambda local: local.reshape(-1), unpack


def _chunk_lengths(layout: Layout, dim: int) -> tuple[int, ...]:
    return chunk_numels(layout.base_shape[dim], layout.placement.axis_size)


def _pieces(layout: Layout, dim: int, lengths: tuple[int, ...]) -> list[list[tuple]]:
    """Return, for every rank's chunk, what of this rank's ragged part lies in it."""
    return pieces_by_chunk(
        list(boxes_of_range(layout.start, layout.end, layout.base_shape)), dim, lengths
    )


def _views(
    flat: torch.Tensor, layout: Layout, dim: int, lengths: tuple[int, ...]
) -> list[list[torch.Tensor]]:
    """Return, for every rank's chunk, the views of this rank's ``flat`` part that lie in it."""
    return [
        [
            flat[box.start : box.start + box.numel].view(box.shape).narrow(dim, start, length)
            for box, start, length in pieces
        ]
        for pieces in _pieces(layout, dim, lengths)
    ]


def _numels_in_chunk(
    layout: Layout, dim: int, lengths: tuple[int, ...], rank: int
) -> tuple[int, ...]:
    """Return how many elements of every rank's ragged part lie in the chunk of ``rank``."""
    counts, end = [], 0
    only_mine = [sum(lengths[:rank]), lengths[rank]]  # what lies before it, and the chunk
    for numel in layout.split_numels:
        start, end = end, end + numel
        boxes = list(boxes_of_range(start, end, layout.base_shape))
        counts.append(_numel(pieces_by_chunk(boxes, dim, only_mine)[1], dim))
    return tuple(counts)


def _numel(pieces: list[tuple], dim: int) -> int:
    return sum(box.numel // box.shape[dim] * length for box, _, length in pieces)
