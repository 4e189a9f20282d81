# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from vescale.fsdp import packing, packing_exact
from vescale.fsdp.planner import Plan, Request
from vescale.fsdp.shard_search import search_layout
from vescale.fsdp.validate import validate_plan

A, B = Request("a", 6, 2), Request("b", 5)


@pytest.mark.parametrize(
    ("plan", "invariant"),
    [
        (Plan((A, B), (0, 6), 6, 2, 4), "I1"),
        (Plan((A, B), (0, 6), 0, 2, 1), "I1"),
        (Plan((A, B), (0, 6), -8, 2, 1), "I1"),
        (Plan((A, B), (0, 5), 6, 2, 1), "I2: b"),
        (Plan((A, B), (0, 8), 6, 2, 1), "I2: b"),
        (Plan((B, A), (0, -1), 6, 2, 1), "I2: a"),
        (Plan((A,), (1,), 4, 2, 1), "I3: a"),
        (Plan((A,), (1,), 3, 4, 1), "I3: a"),  # first edge right, second wrong
        (Plan((Request("whole", 3, 9),), (1,), 2, 2, 1), "I3: whole"),
    ],
)
def test_a_broken_plan_is_refused_with_invariant_and_name(plan, invariant):
    with pytest.raises(RuntimeError, match=invariant):
        validate_plan(plan)


@pytest.mark.parametrize(
    "plan",
    [
        Plan((A, B), (0, 6), 6, 2, 1),
        Plan((A, B), (0, 6), 2, 6, 2),
        Plan((Request("short", 7, 2),), (0,), 4, 2, 4),
        Plan((Request("empty", 0, 3), A), (0, 0), 6, 1, 3),
        Plan((Request("empty", 0, 3),), (0,), 0, 4, 8),
        Plan((), (), 0, 4, 8),
    ],
)
def test_a_right_plan_is_accepted(plan):
    validate_plan(plan)


def faulty_gap(numel, block, shard):
    def place(position):
        inside = position % shard
        if inside + numel <= shard:
            return position
        return position + position % block

    return place


def faulty_reach(numel, block, shard):
    right = packing_placer(numel, block, shard)

    def place(position):
        inside = position % shard
        gap = (shard - inside) % block
        if shard % block and inside + gap + numel <= 3 * shard and inside + numel > shard:
            return position + gap
        return right(position)

    return place


def faulty_restart(numel, block, shard):
    def place(position):
        inside = position % shard
        if inside + numel <= shard:
            return position
        return position + (shard - inside) % block

    return place


packing_placer = packing.placer


def cases():
    generator = random.Random(7)
    for _ in range(150):
        sizes = []
        for _ in range(generator.randint(1, 6)):
            numel = generator.randint(1, 40)
            sizes.append((numel, generator.randint(1, numel)))
        yield sizes, generator.randint(2, 8)


def count_refused():
    refused = 0
    for sizes, world_size in cases():
        offsets, shard = search_layout(sizes, world_size, 1)
        requests = tuple(Request(f"w{i}", *size) for i, size in enumerate(sizes))
        try:
            validate_plan(Plan(requests, tuple(offsets), shard, world_size, 1))
        except RuntimeError:
            refused += 1
    return refused


@pytest.mark.parametrize("fault", [faulty_gap, faulty_reach, faulty_restart])
def test_a_fault_planted_in_the_planner_is_noticed(fault, monkeypatch):
    monkeypatch.setattr(packing, "placer", fault)
    monkeypatch.setattr(packing_exact, "placer", fault)
    assert count_refused() > 0


def test_without_a_fault_nothing_is_refused():
    assert count_refused() == 0
