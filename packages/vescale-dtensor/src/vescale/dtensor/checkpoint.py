# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed.checkpoint asks of a ragged tensor: its part, as boxes of the whole.

A flat range of an n-dim tensor is at most ``2n - 1`` axis-aligned boxes; each is one write item
or one chunk to read into. A rank that holds nothing has none. A tensor without elements has no
boxes at all; the mesh's first rank writes one empty item, so that the checkpoint knows its key.
"""

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.spec import layout_of


def write_items(fqn: str, x: TorchDTensor) -> list[WriteItem]:
    """Return one write item per box of this rank's part of ``x``."""
    check_not_partial(fqn, x)
    properties = TensorProperties.create_from_tensor(x._local_tensor)
    chunks = chunk_list(x)
    if x.numel() == 0 and not any(x._spec.mesh.get_coordinate() or ()):
        chunks = [ChunkStorageMetadata(offsets=torch.Size([0] * x.ndim), sizes=x.size())]
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=x.size()),
        )
        for chunk in chunks
    ]


def chunk_list(x: TorchDTensor) -> list[ChunkStorageMetadata]:
    """Return the boxes of this rank's part of ``x``."""
    check_not_partial("", x)
    return [
        ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))
        for box in layout_of(x._spec).boxes
    ]


def tensor_shard(x: TorchDTensor, index: MetadataIndex) -> torch.Tensor:
    """Return the box that begins at ``index.offset``, as a view of the local tensor."""
    offset = tuple(index.offset) if index.offset is not None else None
    boxes = layout_of(x._spec).boxes
    if x.numel() == 0:
        return x._local_tensor.detach().view(x.size())
    for box in boxes:
        if box.offset == offset:
            return x._local_tensor.detach()[box.start : box.start + box.numel].view(box.shape)
    raise ValueError(
        f"{index.fqn}: this rank holds no box at offset {offset}, only at "
        f"{[box.offset for box in boxes]}; was the tensor redistributed after planning?"
    )


def check_not_partial(fqn: str, x: TorchDTensor) -> None:
    """Raise ValueError when ``x`` still has to be reduced."""
    if any(placement.is_partial() for placement in x._spec.placements):
        raise ValueError(
            f"{fqn or 'a tensor'} is {x._spec.placements}, so no rank holds its values; "
            "redistribute it to Replicate, Shard or RaggedShard before checkpointing."
        )
