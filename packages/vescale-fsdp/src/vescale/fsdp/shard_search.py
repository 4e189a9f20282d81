# SPDX-License-Identifier: Apache-2.0
"""Search for the smallest shard size at which the tensors of one buffer can be packed.

What fits at one size need not fit at a larger one: (numel=6, block=2) over four ranks fits at 2 and
4, but not at 3. So no bisection over all sizes is right; sizes that are multiples of the blocks, of
their least common multiples and of their common divisors are tried one by one, and what lies
between is sampled. All sizes are in elements. Effort is bounded by counts, never by time, so that
all ranks find the same layout.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations

from vescale.fsdp.packing import (
    Class,
    Group,
    Runs,
    encode_runs,
    order_fits,
    pack_greedily,
    round_up,
    starts_in_order,
)
from vescale.fsdp.packing_exact import FreePacker, largest_classes

Packer = Callable[[Group, int], Runs | None]
Found = tuple[int, Runs]  # a shard size, and an order that fits

ALL_SIZES = 128  # with at most so many multiples of the alignment to try, each is tried
MOST_CLASSES = 20  # classes whose blocks decide which sizes are tried
GREEDY_STEPS = 50_000  # tensors times classes up to which the greedy packers run
CROSSING_STEPS = 5_000  # the same for the second of them
EXACT_STATES = 10_000  # sets of tensors up to which all classes are interleaved, not two
WIDTH = 32  # sets of equally many tensors that are kept when two classes are interleaved
EFFORT = 90_000  # times that a tensor is added to a set of tensors, to interleave classes
CLOSE = 40_000  # a shard at most 1 / CLOSE over the lower bound is not improved further
WORTH = 5_000  # classes are interleaved when the shard is over 1 / WORTH above the lower bound


def search_layout(sizes: Sequence[Class], world_size: int, align: int) -> tuple[list[int], int]:
    """Return the offsets of the tensors ``(numel, block)`` and the shard size.

    At least one tensor; none is empty, and no block is larger than its tensor.
    """
    group = Group.of(sizes, world_size, align)
    shard, runs = smallest_shard(group)
    return starts_in_order(group, runs, shard), shard


def smallest_shard(group: Group, *, effort: int = EFFORT) -> Found:
    """Return the smallest shard size found, and an order that fits there.

    ``effort`` bounds what is the slowest part in groups of many tensors: to interleave classes.
    """
    low = lower_bound(group)
    orders = three_orders(group)
    if group.world_size == 1:
        return low, orders[1]
    found = common_multiple(group, orders[0])
    for packer in _packers(group, orders):
        if found[0] <= low + low // CLOSE:
            return found
        found = improve(group, packer, low, found)
    if found[0] > low + low // WORTH and effort:
        found = _interleave(group, low, found, effort)
    return found


def _packers(group: Group, orders: Iterable[Runs]) -> Iterator[Packer]:
    for runs in dict.fromkeys(orders):
        yield partial(_keep_order, runs)
    steps = len(group.members) * len(group.classes) if len(group.classes) > 1 else math.inf
    if steps <= GREEDY_STEPS:
        yield partial(pack_greedily, cross_first=False)
    if steps <= CROSSING_STEPS:
        yield partial(pack_greedily, cross_first=True)


def _interleave(group: Group, low: int, found: Found, effort: int) -> Found:
    every = range(len(group.classes))
    if len(every) == 1:
        return found
    if group.states(every) <= EXACT_STATES:
        return improve(group, FreePacker(every, effort), low, found)
    pair = largest_classes(group, 2)
    # Only at these sizes do the boundaries meet few different places in the blocks of both.
    base = math.lcm(group.align, math.gcd(*(group.classes[index][1] for index in pair)))
    shards = _multiples(group, base, low, found[0], dense=24)
    return first_fit(group, FreePacker(pair, effort, WIDTH), shards) or found


def _keep_order(runs: Runs, group: Group, shard: int) -> Runs | None:
    return runs if order_fits(group, runs, shard) else None


def three_orders(group: Group) -> tuple[Runs, Runs, Runs]:
    """Return the tensors by block, as given, and by size; ties by their place in the input."""
    given = group.members
    by_block = sorted(given, key=lambda i: -group.classes[i][1])
    by_size = sorted(given, key=lambda i: (-group.classes[i][0], -group.classes[i][1]))
    return encode_runs(by_block), encode_runs(given), encode_runs(by_size)


def next_placeable(group: Group, low: int, base: int) -> int:
    """Return the smallest multiple of ``base`` from ``low`` on with a legal start for each tensor.

    Each tensor is looked at alone, in an empty buffer.
    """
    limits = [
        (free, block) for free, (_, block) in zip(group.free_from, group.classes, strict=True)
    ]
    shard = round_up(low, base)
    while True:
        limits = [(free, block) for free, block in limits if free > shard]
        if not limits:
            return shard
        aligned = round_up(shard, math.lcm(base, *(block for _, block in limits)))
        free = round_up(min(limits)[0], base)
        if aligned <= free:
            return aligned
        shard = free  # here one tensor less forces its block on the shard


def lower_bound(group: Group) -> int:
    """Return a size that no valid shard is below; a plan that reaches it is optimal."""
    blocks = (block for _, block in group.classes)
    least = max(1, -(-group.numel // group.world_size), *blocks)
    return next_placeable(group, least, group.align)


def common_multiple(group: Group, runs: Runs) -> Found:
    """Return the smallest multiple of all blocks at which the order fits, or one shard for all.

    All boundaries being block edges, a gap is needed only before a tensor that meets a boundary: at
    most world_size - 1 gaps, each less than the multiple L. So it fits at S0 + L at the latest,
    with S0 the first multiple of L that holds all elements.
    """
    multiple = math.lcm(group.align, *(block for _, block in group.classes))
    shard = round_up(-(-group.numel // group.world_size), multiple)
    while not order_fits(group, runs, shard):
        shard += multiple
    return min(shard, round_up(group.numel, group.align)), runs


def first_fit(group: Group, packer: Packer, shards: Iterable[int]) -> Found | None:
    """Return the first of the shard sizes at which the packer succeeds."""
    for shard in shards:
        runs = packer(group, shard)
        if runs is not None:
            return shard, runs
    return None


def improve(group: Group, packer: Packer, low: int, found: Found) -> Found:
    """Return a smaller shard size from ``low`` on at which the packer succeeds, or ``found``."""
    align = group.align
    if found[0] - low <= ALL_SIZES * align:
        shards = _multiples(group, align, low, found[0], dense=ALL_SIZES)
        return first_fit(group, packer, shards) or found
    structured = {low}
    for base in _bases(group, low):
        structured.update(_multiples(group, base, low, found[0], dense=4))
    found = first_fit(group, packer, sorted(structured)) or found
    return _sample(group, packer, low, found)


def _sample(group: Group, packer: Packer, failed: int, found: Found) -> Found:
    """Try ever rarer sizes above ``failed``, then bisect the gap below the first that fits."""
    align = group.align
    for shard in _multiples(group, align, failed + align, found[0], dense=1):
        runs = packer(group, shard)
        if runs is not None:
            found = shard, runs
            break
        failed = shard
    high = found[0]
    while high - failed > align:
        half = failed + (high - failed) // align // 2 * align
        middle = next_placeable(group, half, align)
        runs = packer(group, middle) if middle < high else None
        if runs is not None:
            high, found = middle, (middle, runs)
        elif middle < high:
            failed = middle
        else:
            high = half  # no size from here to the old high is legal for each tensor alone
    return found


def _bases(group: Group, low: int) -> set[int]:
    """Return the numbers whose multiples are worth trying as shard sizes.

    Those are the blocks of the largest classes; and for the largest blocks of tensors that must
    meet a boundary, the least common multiple and the greatest common divisor of each subset, so
    that the boundaries meet few different places in a block.
    """
    classes = [group.classes[index] for index in largest_classes(group, MOST_CLASSES)]
    blocks = [block for _, block in classes]
    long = sorted({block for numel, block in classes if numel > low}, reverse=True)[:4]
    bases = {*blocks, math.lcm(*blocks), math.gcd(*blocks[:2])}
    for count in range(2, len(long) + 1):
        for some in combinations(long, count):
            bases |= {math.lcm(*some), math.gcd(*some)}
    return {math.lcm(group.align, base) for base in bases}


def _multiples(group: Group, base: int, low: int, high: int, *, dense: int) -> Iterator[int]:
    """Yield multiples of ``base`` in [low, high): the first ``dense``, then ever rarer ones."""
    step = base
    shard = next_placeable(group, low, base)
    while shard < high:
        yield shard
        dense -= 1
        if dense < 0:
            step *= 2
        shard = next_placeable(group, shard + step, base)
