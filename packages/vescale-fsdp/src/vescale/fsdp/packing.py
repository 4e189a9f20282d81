# SPDX-License-Identifier: Apache-2.0
"""Pack tensors into equal shards of a given size so that no block is cut, if that is possible.

Tensors of equal ``(numel, block)`` are alike and form one class. An order is run-length encoded:
``Runs`` is a sequence of ``(class index, count)``. A packer returns an order that fits, or None;
offsets follow from the order, since every tensor is placed as early as possible. For a fixed order
that minimises the end of every prefix, because the earliest legal start does not decrease with the
position it is looked for from. All sizes are in elements.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

Class = tuple[int, int]
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Group:
    """The tensors of one buffer: ``counts[i]`` of class ``classes[i]``, over ``world_size`` shards.

    ``members[j]`` is the class index of tensor ``j``. No tensor is empty, no block larger than its
    tensor, and the shard size is a multiple of ``align``.
    """

    classes: tuple[Class, ...]
    members: tuple[int, ...]
    world_size: int
    align: int

    @staticmethod
    def of(sizes: Sequence[Class], world_size: int, align: int) -> "Group":
        """Return the group of the tensors ``(numel, block)``."""
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(sizes))}
        return Group(tuple(numbers), tuple(numbers[pair] for pair in sizes), world_size, align)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many tensors each class has."""
        tally = Counter(self.members)
        return tuple(tally[index] for index in range(len(self.classes)))

    @cached_property
    def numel(self) -> int:
        """Elements of all tensors together."""
        return sum(self.classes[index][0] for index in self.members)

    @cached_property
    def free_from(self) -> tuple[int, ...]:
        """For each class, the shard size from which on its tensors have a legal start."""
        return tuple(free_from(*pair) for pair in self.classes)

    def states(self, indices: Iterable[int]) -> int:
        """Return how many different sets of tensors of these classes there are."""
        return math.prod(self.counts[index] + 1 for index in indices)

    def spare(self, shard: int) -> int:
        """Return the elements that all gaps of a buffer of such shards may have together."""
        return self.world_size * shard - self.numel


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def encode_runs(class_indices: Iterable[int]) -> Runs:
    """Return the run-length encoding of a sequence of class indices."""
    return tuple((index, sum(1 for _ in same)) for index, same in groupby(class_indices))


def free_from(numel: int, block: int) -> int:
    """Return the shard size from which on a tensor has a legal start at every shard size.

    Below it there is one exactly where ``block`` divides the shard size. A start is legal when
    every shard boundary inside the tensor is a block edge.
    """
    half = (numel - block) // (2 * block) + 1  # the least with (2 * half + 1) * block > numel
    return max(half * block, numel - half * block)


def placer(numel: int, block: int, shard: int) -> Callable[[int], int]:
    """Return the function from a position to the earliest legal start at or after it.

    ``shard`` must be at least ``free_from(numel, block)`` or a multiple of ``block``.
    """
    residue = shard % block

    def place_aligned(position: int) -> int:
        if position % shard + numel <= shard:
            return position  # meets no boundary
        return -(-position // block) * block  # every boundary is a block edge

    def place(position: int) -> int:
        inside = position % shard
        if inside + numel <= shard:
            return position
        gap = (shard - inside) % block  # makes the next boundary a block edge
        if inside + gap + numel <= shard + shard:
            return position + gap  # meets that boundary only
        # To meet two boundaries would need a block that divides the shard: start in the next one.
        return position + shard - inside + residue

    return place if residue else place_aligned


def order_fits(group: Group, runs: Runs, shard: int) -> bool:
    """Return whether the tensors fit in this order.

    Walks runs, not tensors, wherever equal tensors follow each other without a gap.
    """
    spare, position = group.spare(shard), 0
    if spare < 0:
        return False
    for index, count in runs:
        numel, block = group.classes[index]
        residue = shard % block
        while count:
            rest = shard - position % shard
            if numel <= rest:
                whole = min(rest // numel, count)
                position += whole * numel
                count -= whole
                continue
            # What follows is place() of the placer, in line: this loop is most of the search.
            if residue:
                gap = rest % block
                if gap + numel > rest + shard:
                    gap = rest + residue
                whole = 1
            else:
                gap = -position % block
                whole = count if numel % block == 0 else 1
            spare -= gap
            if spare < 0:
                return False
            position += gap + whole * numel
            count -= whole
    return True


def starts_in_order(group: Group, runs: Runs, shard: int) -> list[int]:
    """Return the start of every tensor; those of one class take theirs in the order of input."""
    starts: list[list[int]] = [[] for _ in group.classes]
    position = 0
    for index, count in runs:
        numel, block = group.classes[index]
        place = placer(numel, block, shard)
        for _ in range(count):
            starts[index].append(place(position))
            position = starts[index][-1] + numel
    queues = [iter(of_class) for of_class in starts]
    return [next(queues[index]) for index in group.members]


def pack_greedily(group: Group, shard: int, *, cross_first: bool) -> Runs | None:
    """Return the order that takes at each place the tensor which suits it, if it fits.

    That is the largest block which fits into the rest of the shard; if none does, the tensor that
    crosses the boundary with the smallest gap. ``cross_first`` prefers a crossing without gap.
    """
    spare, position = group.spare(shard), 0
    left = list(group.counts)
    waiting = [  # large blocks first
        (index, *group.classes[index], shard % group.classes[index][1])
        for index in sorted(range(len(left)), key=lambda i: (-group.classes[i][1], i))
    ]
    runs: list[tuple[int, int]] = []
    while waiting:
        rest = shard - position % shard
        chosen, gap = None, spare + 1
        for entry in waiting:
            if entry[1] <= rest:
                chosen, gap = entry, 0
                break
        if chosen is None or cross_first:
            for entry in waiting:
                _, numel, block, residue = entry
                if numel <= rest:
                    continue
                if residue:
                    here = rest % block
                    if here + numel > rest + shard:
                        here = rest + residue
                else:
                    here = -position % block
                if here < gap or not here:
                    chosen, gap = entry, here
                    if not here:
                        break
        if chosen is None:
            return None
        index, numel = chosen[:2]
        count = min(left[index], rest // numel) or 1
        position += gap + count * numel
        spare -= gap
        runs.append((index, count))
        left[index] -= count
        if not left[index]:
            waiting.remove(chosen)
    return tuple(runs) if spare >= 0 else None
