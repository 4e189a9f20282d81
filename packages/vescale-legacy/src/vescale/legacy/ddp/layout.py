# SPDX-License-Identifier: Apache-2.0
"""Where parameters and buckets lie in one flat gradient buffer. Integers only."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Layout", "Slot", "lay_out"]


@dataclass(frozen=True)
class Slot:
    """Elements [start, end) of the buffer, in bucket number ``bucket``."""

    start: int
    end: int
    bucket: int


@dataclass(frozen=True)
class Layout:
    """One slot for each parameter, in the order given, and [start, end) of each bucket."""

    slots: tuple[Slot, ...]
    buckets: tuple[tuple[int, int], ...]
    numel: int


def lay_out(numels: Sequence[int], bucket_numel: int | None, divisor: int) -> Layout:
    """Lay parameters out in reverse, as their gradients come, closing a bucket when it is full.

    A bucket is full with ``bucket_numel`` elements or more; None makes one bucket. The end of each
    is padded so that ``divisor`` divides its length.
    """
    slots: list[Slot | None] = [None] * len(numels)
    buckets: list[tuple[int, int]] = []
    start = end = 0
    for index in reversed(range(len(numels))):
        slots[index] = Slot(end, end + numels[index], len(buckets))
        end += numels[index]
        if bucket_numel is not None and end - start >= bucket_numel:
            end = start + -(-(end - start) // divisor) * divisor
            buckets.append((start, end))
            start = end
    if end > start or not buckets:
        end = start + -(-(end - start) // divisor) * divisor
        buckets.append((start, end))
    return Layout(tuple(slots), tuple(buckets), end)
