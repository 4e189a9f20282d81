# SPDX-License-Identifier: Apache-2.0
"""The part of each parameter that one data parallel rank owns, and its fp32 copy."""

from dataclasses import dataclass

import torch
from torch import nn

from vescale.legacy.ddp.grad_buffer import Bucket, GradBuffer, local_of

__all__ = ["Shard", "shards_of", "write_back"]


@dataclass(eq=False)
class Shard:
    """Elements [start, end) of the flattened local part of ``parameter``.

    ``main`` [end - start] is what the inner optimizer updates: a view of the parameter in fp32,
    and a fp32 copy otherwise. ``grad`` is the same elements of the gradient buffer, a view.
    """

    parameter: nn.Parameter
    start: int
    end: int
    main: torch.Tensor
    grad: torch.Tensor

    @property
    def model(self) -> torch.Tensor:
        """The elements themselves, a view of the parameter."""
        return local_of(self.parameter).view(-1)[self.start : self.end]


def shards_of(buffer: GradBuffer, bucket: int) -> list[Shard]:
    """Return what this rank owns of a bucket, in the order of the buffer."""
    first, _ = buffer.layout.buckets[bucket]
    own = buffer.buckets[bucket].own
    lowest, highest = first + own.start, first + own.stop
    found = []
    for parameter, slot in zip(buffer.parameters, buffer.layout.slots, strict=True):
        start, end = max(slot.start, lowest), min(slot.end, highest)
        if slot.bucket != bucket or start >= end:
            continue
        inside = local_of(parameter).view(-1)[start - slot.start : end - slot.start]
        main = inside if inside.dtype == torch.float32 else inside.float()
        shard = Shard(parameter, start - slot.start, end - slot.start, main, buffer.data[start:end])
        found.append((slot.start, shard))
    return [shard for _, shard in sorted(found, key=lambda item: item[0])]


def write_back(buffer: GradBuffer, bucket: int, gathered: torch.Tensor) -> None:
    """Copy the values of a whole bucket into its parameters."""
    first, _ = buffer.layout.buckets[bucket]
    for parameter, slot in zip(buffer.parameters, buffer.layout.slots, strict=True):
        if slot.bucket == bucket:
            values = gathered[slot.start - first : slot.end - first]
            local = local_of(parameter)
            local.copy_(values.view(local.shape))


def fill_own(buffer: GradBuffer, bucket: Bucket, index: int, out: torch.Tensor) -> torch.Tensor:
    """Copy the values of this rank's parameters into ``out``, as long as its part; return it."""
    first, _ = buffer.layout.buckets[index]
    lowest, highest = first + bucket.own.start, first + bucket.own.stop
    for parameter, slot in zip(buffer.parameters, buffer.layout.slots, strict=True):
        start, end = max(slot.start, lowest), min(slot.end, highest)
        if slot.bucket == index and start < end:
            inside = local_of(parameter).view(-1)[start - slot.start : end - slot.start]
            out[start - lowest : end - lowest].copy_(inside)
    return out
