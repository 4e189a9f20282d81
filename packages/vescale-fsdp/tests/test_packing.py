# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vescale.fsdp.packing import (
    Group,
    encode_runs,
    free_from,
    order_fits,
    pack_greedily,
    placer,
    starts_in_order,
)

tensors = st.integers(1, 40).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e)))
groups = st.lists(tensors, min_size=1, max_size=9)


def is_legal(start, numel, block, shard):
    edges = range(start // shard + 1, -(-(start + numel) // shard))
    return all((edge * shard - start) % block == 0 for edge in edges)


def has_start(numel, block, shard):
    return shard >= free_from(numel, block) or shard % block == 0


@given(tensors, st.integers(1, 50), st.integers(0, 200))
def test_placer_returns_the_earliest_legal_start(tensor, shard, position):
    numel, block = tensor
    # Legality repeats with period shard * block, so one period of starts is all of them.
    starts = range(position, position + shard * block)
    first = next((s for s in starts if is_legal(s, numel, block, shard)), None)
    assert has_start(numel, block, shard) == (first is not None)
    if first is not None:
        assert placer(numel, block, shard)(position) == first


@given(tensors, st.integers(1, 50), st.integers(0, 100), st.integers(0, 100))
def test_a_later_position_never_gives_an_earlier_start(tensor, shard, position, further):
    assume(has_start(*tensor, shard))
    place = placer(*tensor, shard)
    assert place(position) <= place(position + further)


def end_of_plain_loop(sizes, shard):
    position = 0
    for numel, block in sizes:
        position = placer(numel, block, shard)(position) + numel
    return position


@given(groups, st.integers(1, 6), st.integers(1, 12), st.integers(1, 80))
def test_runs_fit_exactly_when_the_plain_loop_fits(sizes, repeat, world_size, shard):
    sizes = [size for size in sizes for _ in range(repeat)]
    assume(all(has_start(*size, shard) for size in sizes))
    group = Group.of(sizes, world_size, 1)
    fits = end_of_plain_loop(sizes, shard) <= world_size * shard
    assert order_fits(group, encode_runs(group.members), shard) == fits


@given(groups, st.integers(1, 60))
def test_starts_are_those_of_the_plain_loop(sizes, shard):
    assume(all(has_start(*size, shard) for size in sizes))
    group = Group.of(sizes, 1, 1)
    starts = starts_in_order(group, encode_runs(group.members), shard)
    last = sizes[-1]
    assert starts[-1] + last[0] == end_of_plain_loop(sizes, shard)
    assert starts == sorted(starts)


@pytest.mark.parametrize("cross_first", [False, True])
@given(sizes=groups, world_size=st.integers(1, 8), shard=st.integers(1, 80))
def test_a_greedy_order_has_every_tensor_and_fits(cross_first, sizes, world_size, shard):
    assume(all(has_start(*size, shard) for size in sizes))
    group = Group.of(sizes, world_size, 1)
    runs = pack_greedily(group, shard, cross_first=cross_first)
    if runs is not None:
        assert sorted(i for i, count in runs for _ in range(count)) == sorted(group.members)
        assert order_fits(group, runs, shard)


def test_greedy_fills_the_rest_of_a_shard_before_it_crosses():
    group = Group.of([(6, 6), (5, 5), (2, 2), (3, 3)], 2, 1)
    runs = pack_greedily(group, 8, cross_first=False)
    assert [group.classes[index] for index, _ in runs] == [(6, 6), (2, 2), (5, 5), (3, 3)]
