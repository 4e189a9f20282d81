# SPDX-License-Identifier: Apache-2.0
"""Pack tensors into equal shards of a given size, so that no block is cut.

A tensor class is a pair ``(numel, block)``; tensors of one class are interchangeable. An order is
run-length encoded: ``Runs`` is a sequence of ``(class index, count)``. All sizes are in elements.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

Class = tuple[int, int]
Runs = tuple[tuple[int, int], ...]

NOWHERE = -1


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def encode_runs(class_indices: Iterable[int]) -> Runs:
    """Return the run-length encoding of a sequence of class indices."""
    return tuple((index, sum(1 for _ in same)) for index, same in groupby(class_indices))


def place(position: int, numel: int, block: int, shard: int) -> int:
    """Return the earliest legal start at or after ``position``, or NOWHERE.

    A start is legal when every shard boundary inside the tensor is a block edge. NOWHERE means
    that no start is legal at this ``shard`` at all.
    """
    inside = position % shard
    if inside + numel <= shard:
        return position  # meets no boundary
    rest = shard - inside
    residue = shard % block
    if residue == 0:
        return round_up(position, block)  # every boundary is a block edge
    gap = rest % block  # makes the next boundary a block edge
    if inside + gap + numel <= 2 * shard:
        return position + gap  # meets exactly one boundary
    if residue + numel > 2 * shard:
        return NOWHERE  # two block edges a shard apart need block to divide shard
    return position + rest + residue  # restart in the next shard


def pack_in_order(
    classes: Sequence[Class], runs: Runs, shard: int, world_size: int, total: int
) -> int:
    """Return where the last tensor ends when each is placed as early as possible, or NOWHERE.

    For a fixed order this minimises every prefix's end, since the earliest legal start does not
    decrease with the position: the order fits in ``world_size`` shards exactly when this does.
    ``total`` is the sum of all sizes; the walk stops once the rest cannot fit.
    """
    position, slack = 0, world_size * shard - total
    placed = 0
    for index, count in runs:
        numel, block = classes[index]
        aligned = shard % block == 0
        placed += numel * count
        while count:
            whole = (shard - position % shard) // numel
            if whole:
                whole = min(whole, count)
                position += whole * numel
                count -= whole
            elif aligned and numel % block == 0:
                position = round_up(position, block) + count * numel
                count = 0
            else:
                start = place(position, numel, block, shard)
                if start < 0:
                    return NOWHERE
                position = start + numel
                count -= 1
        if position - placed > slack:
            return NOWHERE
    return position


def offsets_in_order(classes: Sequence[Class], runs: Runs, shard: int) -> list[list[int]]:
    """Return, for each class, the starts of its tensors in the order of ``runs``."""
    starts: list[list[int]] = [[] for _ in classes]
    position = 0
    for index, count in runs:
        numel, block = classes[index]
        for _ in range(count):
            start = place(position, numel, block, shard)
            if start < 0:
                raise RuntimeError(f"a tensor of {numel} with block {block} cannot lie in {shard}")
            starts[index].append(start)
            position = start + numel
    return starts
