# SPDX-License-Identifier: Apache-2.0
"""Find the best order by a dynamic program over how many tensors of each class are placed.

The least end with which a set of tensors can stand first is a minimum over the tensor placed last,
because the earliest legal start does not decrease with the position. A set whose gaps exceed what
the buffer can spare is dropped. All sizes are in elements.
"""

from collections.abc import Sequence

from vescale.fsdp.packing import Group, Runs, encode_runs, placer


class FreePacker:
    """Interleave the classes ``free`` in the best way, behind all other tensors.

    With all classes free, a call returns an order whenever there is one: O(states * classes). With
    two classes it is for layers of hundreds of single experts, which are of two or three kinds.
    Once ``effort`` sets of tensors were visited in total, calls return None at once.
    """

    def __init__(self, free: Sequence[int], effort: int) -> None:
        self.free, self.effort = tuple(free), effort

    def __call__(self, group: Group, shard: int) -> Runs | None:
        """Return an order that fits, or None."""
        if self.effort <= 0:
            return None
        others = sorted(
            set(range(len(group.classes))).difference(self.free),
            key=lambda i: (-group.classes[i][1], i),
        )
        before = tuple((index, group.counts[index]) for index in others)
        start, numel = _end_of_runs(group, before, shard)
        order = self._interleave(group, shard, start, numel + group.spare(shard))
        return None if order is None else before + order

    def _interleave(self, group: Group, shard: int, start: int, bound: int) -> Runs | None:
        """Return the best order from ``start`` on; n elements of it may end at ``bound + n``."""
        moves, states = [], 1
        for index in self.free:
            numel, block = group.classes[index]
            radix = group.counts[index] + 1
            moves.append((index, states, radix, numel, placer(numel, block, shard)))
            states *= radix
        # A state is a set of placed tensors: the count of each class is one digit.
        ends: list[int | None] = [None] * states
        bounds, last = [bound] * states, [0] * states
        if start <= bound:
            ends[0] = start
        for state, position in enumerate(ends):
            if position is None:
                continue
            self.effort -= 1
            bound = bounds[state]
            for index, stride, radix, numel, place in moves:
                if (state // stride + 1) % radix:
                    end = place(position) + numel
                    if end <= bound + numel:
                        after = state + stride
                        known = ends[after]
                        if known is None or end < known:
                            ends[after], bounds[after], last[after] = end, bound + numel, index
        if ends[-1] is None:
            return None
        strides = {index: stride for index, stride, *_ in moves}
        order, state = [], states - 1
        while state:
            order.append(last[state])
            state -= strides[last[state]]
        return encode_runs(reversed(order))


def largest_classes(group: Group, count: int) -> tuple[int, ...]:
    """Return the ``count`` classes with the most elements, those first whose blocks matter.

    Blocks that divide the alignment of the shards are cut by none of their boundaries.
    """

    def size(index: int) -> int:
        numel, block = group.classes[index]
        return numel * group.counts[index] if group.align % block else 0

    return tuple(sorted(range(len(group.classes)), key=lambda i: (-size(i), i))[:count])


def _end_of_runs(group: Group, runs: Runs, shard: int) -> tuple[int, int]:
    """Return where the runs end when they stand first, and their elements."""
    position = total = 0
    for index, count in runs:
        numel, block = group.classes[index]
        place = placer(numel, block, shard)
        for _ in range(count):
            position = place(position) + numel
        total += count * numel
    return position, total
