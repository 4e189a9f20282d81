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

    A bucket is full with ``bucket_numel`` elements or more; None makes one bucket. Parameters
    without elements join the bucket before them. The end of each bucket is padded so that
    ``divisor`` divides its length.
    """
    slots: list[Slot | None] = [None] * len(numels)
    buckets: list[tuple[int, int]] = []
    start = end = 0

    def close() -> int:
        stop = start + -(-(end - start) // divisor) * divisor
        buckets.append((start, stop))
        return stop

    for index in reversed(range(len(numels))):
        if numels[index] and bucket_numel is not None and end - start >= bucket_numel:
            start = end = close()
        slots[index] = Slot(end, end + numels[index], len(buckets))
        end += numels[index]
    end = close()
    return Layout(tuple(slots), tuple(buckets), end)
