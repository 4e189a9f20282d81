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
    a ``width`` it keeps so many sets of equally many tensors, and may miss one. That is for layers
    of hundreds of single experts, which are of two or three kinds: O(tensors * width).

    All calls together try at most ``effort`` times to add a tensor to a set; then they give up.
    """

    def __init__(self, free: Sequence[int], effort: int, width: int | None = None) -> None:
        self.free, self.effort, self.width = tuple(free), effort, width

    def __call__(self, group: Group, shard: int) -> Runs | None:
        """Return an order that fits, or None."""
        if self.effort <= 0:
            return None
        others = sorted(
            set(range(len(group.classes))).difference(self.free),
            key=lambda i: (-group.classes[i][1], i),
        )
        before = tuple((index, group.counts[index]) for index in others)
        start, gap = _end_of_runs(group, before, shard)
        order = self._interleave(group, shard, start, gap)
        return None if order is None else before + order

    def _interleave(self, group: Group, shard: int, start: int, gap: int) -> Runs | None:
        """Return the best order from ``start`` on, with gaps of ``gap`` elements before it."""
        spare = group.spare(shard)
        moves, states, steps = [], 1, 0
        for index in self.free:
            numel, block = group.classes[index]
            radix = group.counts[index] + 1
            moves.append((index, states, radix, numel, block, shard % block))
            states *= radix
            steps += group.counts[index]
        # A state is a set of placed tensors: the count of each class is one digit. A level has the
        # states of equally many tensors, each with its least gaps and where it ends.
        level = {0: (gap, start)} if gap <= spare else {}
        last: dict[int, int] = {}
        for placed in range(1, steps + 1):
            self.effort -= len(level) * len(moves)
            if not level or self.effort < 0:
                return None
            above: dict[int, tuple[int, int]] = {}
            for state, (gap, position) in level.items():
                rest = shard - position % shard
                for index, stride, radix, numel, block, residue in moves:
                    if not (state // stride + 1) % radix:
                        continue
                    here = 0
                    if numel > rest:  # place() of the placer, in line
                        if residue:
                            here = rest % block
                            if here + numel > rest + shard:
                                here = rest + residue
                        else:
                            here = -position % block
                    if gap + here <= spare:
                        after = state + stride
                        known = above.get(after)
                        if known is None or gap + here < known[0]:
                            above[after] = gap + here, position + here + numel
                            last[after] = index
            level = above
            if self.width is not None and len(above) > self.width:
                level = self._narrow(above, group.counts[self.free[0]], steps, placed)
        if states - 1 not in level:
            return None
        strides = {index: stride for index, stride, *_ in moves}
        order, state = [], states - 1
        while state:
            order.append(last[state])
            state -= strides[last[state]]
        return encode_runs(reversed(order))

    def _narrow(
        self, level: dict[int, tuple[int, int]], count: int, steps: int, placed: int
    ) -> dict[int, tuple[int, int]]:
        """Return the sets with the least gaps, one for each end: that of the most even mixture.

        ``count`` of all ``steps`` tensors are of the first class, and ``placed`` are placed.
        """
        kept: dict[tuple[int, int], tuple[int, int]] = {}
        for state, ends in level.items():
            uneven = abs(state % (count + 1) * steps - count * placed)
            known = kept.get(ends)
            if known is None or uneven < known[0]:
                kept[ends] = uneven, state
        return {kept[ends][1]: ends for ends in sorted(kept)[: self.width]}


def largest_classes(group: Group, count: int) -> tuple[int, ...]:
    """Return the ``count`` classes with the most elements, those first whose blocks matter.

    Blocks that divide the alignment of the shards are cut by none of their boundaries.
    """

    def size(index: int) -> int:
        numel, block = group.classes[index]
        return numel * group.counts[index] if group.align % block else 0

    return tuple(sorted(range(len(group.classes)), key=lambda i: (-size(i), i))[:count])


def _end_of_runs(group: Group, runs: Runs, shard: int) -> tuple[int, int]:
    """Return where the runs end when they stand first, and the elements of their gaps."""
    position = total = 0
    for index, count in runs:
        numel, block = group.classes[index]
        place = placer(numel, block, shard)
        for _ in range(count):
            position = place(position) + numel
        total += count * numel
    return position, position - total
