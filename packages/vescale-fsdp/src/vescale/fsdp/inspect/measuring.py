# SPDX-License-Identifier: Apache-2.0
"""Count where two flat tensors differ, and add up what the ranks of a group have counted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from vescale.fsdp.phases import waiting

CHUNK_NUMEL = 1 << 20  # elements that are looked at at a time, as float64
NOWHERE = torch.iinfo(torch.int64).max


@dataclass(slots=True)
class Measured:
    """What two parts of a tensor are apart; ``first`` is the flat index of a difference.

    Parts of different ranks with one ``copy`` number are parts of one copy of the tensor; None is a
    copy that this rank has all of.
    """

    count: int = 0
    nans: list[int] = field(default_factory=lambda: [0, 0])
    max_abs: float = 0.0
    magnitude: float = 0.0
    first: int = NOWHERE
    copy: int | None = 0

    @property
    def max_rel(self) -> float:
        """The largest difference over the largest magnitude."""
        if self.max_abs in (0.0, math.inf):
            return self.max_abs
        return self.max_abs / self.magnitude


def measure(a: torch.Tensor, b: torch.Tensor) -> Measured:
    """Return how ``a`` and ``b``, [n] on one device, differ; holds some tens of MiB more."""
    found = Measured()
    for start in range(0, a.numel(), CHUNK_NUMEL):
        _add_chunk(found, a[start : start + CHUNK_NUMEL], b[start : start + CHUNK_NUMEL], start)
    return found


def _add_chunk(found: Measured, a: torch.Tensor, b: torch.Tensor, start: int) -> None:
    x, y = _wide(a), _wide(b)
    nan_x, nan_y = x.isnan(), y.isnan()
    inexact = any(t.is_floating_point() or t.is_complex() for t in (a, b))
    apart = x != y if inexact else a != b  # large integers are rounded in x and y
    apart &= ~(nan_x & nan_y)
    numbers = apart & ~nan_x & ~nan_y
    found.nans[0] += int(nan_x.sum())
    found.nans[1] += int(nan_y.sum())
    for values in (x, y):
        finite = values[values.isfinite()].abs()
        if finite.numel():
            found.magnitude = max(found.magnitude, float(finite.max()))
    if not bool(apart.any()):
        return
    found.count += int(apart.sum())
    found.first = min(found.first, start + int(apart.int().argmax()))
    if bool(numbers.any()):
        found.max_abs = max(found.max_abs, float((x - y)[numbers].abs().max()))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def over_ranks(
    parts: Sequence[Measured], copies: int, group: dist.ProcessGroup, device: torch.device
) -> list[Measured]:
    """Return what all ranks of ``group`` found together, each having passed as many ``parts``.

    ``copies`` is one more than the largest copy number. Sends 24 bytes for each copy of each part,
    and 48 more, in three all-reduces.
    """
    counts = torch.zeros(len(parts), copies, 3, dtype=torch.int64)
    largest = torch.zeros(len(parts), 5, dtype=torch.float64)
    first = torch.zeros(len(parts), dtype=torch.int64)
    for row, part in enumerate(parts):
        mine = [part.count, *part.nans]
        whole = part.copy is None
        if not whole:
            counts[row, part.copy] = torch.tensor(mine)
        largest[row] = torch.tensor(
            [part.max_abs, part.magnitude, *(whole * n for n in mine)], dtype=torch.float64
        )
        first[row] = part.first
    with waiting("sum of differences over ranks", group=group):
        counts = _reduced(counts, dist.ReduceOp.SUM, group, device)
        largest = _reduced(largest, dist.ReduceOp.MAX, group, device)
        first = _reduced(first, dist.ReduceOp.MIN, group, device)
    worst = torch.maximum(counts.amax(dim=1), largest[:, 2:].long())
    return [
        Measured(count, nans, max_abs, magnitude, at)
        for (count, *nans), (max_abs, magnitude, *_), at in zip(
            worst.tolist(), largest.tolist(), first.tolist(), strict=True
        )
    ]


def _reduced(
    values: torch.Tensor,
    op: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    there = values.to(device)
    dist.all_reduce(there, op=op, group=group)
    return there.cpu()
