# SPDX-License-Identifier: Apache-2.0
"""Search for the smallest shard size at which the tensors of one buffer can be packed."""

import math
from collections.abc import Sequence

from vescale.fsdp.packing import (
    Class,
    encode_runs,
    offsets_in_order,
    pack_in_order,
    round_up,
)


def search_layout(sizes: Sequence[Class], world_size: int, align: int) -> tuple[list[int], int]:
    """Return the offsets of the tensors ``(numel, block)``, all non-empty, and the shard size."""
    classes = list(dict.fromkeys(sizes))
    number = {pair: i for i, pair in enumerate(classes)}
    total = sum(numel for numel, _ in sizes)
    grain = math.lcm(align, *(block for _, block in classes))
    base = round_up(-(-total // world_size), grain)
    runs = encode_runs(number[pair] for pair in sizes)
    for shard in (base, base + grain):
        if pack_in_order(classes, runs, shard, world_size, total) >= 0:
            starts = [iter(s) for s in offsets_in_order(classes, runs, shard)]
            return [next(starts[number[pair]]) for pair in sizes], shard
    raise RuntimeError("no shard size was found, which the bound base + grain rules out")
