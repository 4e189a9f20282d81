# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from vescale.fsdp import lane_search
from vescale.fsdp.lane_search import LaneSearch, divide, kinds_of_blocks
from vescale.fsdp.shard_search import search_layout

tensors = st.integers(1, 30).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e)))
sizes_lists = st.lists(tensors, min_size=1, max_size=9)


def make(sizes, world_size, align=1, least=1):
    single = search_layout(sizes, world_size, align)[1]
    return LaneSearch(sizes, world_size, align, single, least)


def test_every_division_comes_once():
    # Stirling numbers of the second kind: 1 + 31 + 90 ways for six kinds.
    found = list(divide(6, 3))
    assert len(found) == len(set(found)) == 122
    for lanes in found:
        assert sorted(kind for lane in lanes for kind in lane) == list(range(6))
        assert all(lane == tuple(sorted(lane)) and lane for lane in lanes)
    assert [len(list(divide(4, most))) for most in (1, 2, 3, 4)] == [1, 8, 14, 15]


@given(sizes_lists, st.integers(1, 8), st.integers(1, 4))
def test_kinds_hold_every_tensor_once(sizes, world_size, least):
    kinds = kinds_of_blocks(sizes, world_size, 1, least)
    assert sorted(index for kind in kinds for index in kind) == list(range(len(sizes)))
    assert min(least, len(sizes)) <= len(kinds) <= max(least, lane_search.MOST_KINDS + 1)
    assert all(kind == tuple(sorted(kind)) for kind in kinds)


def test_long_and_short_tensors_of_one_block_are_two_kinds_and_small_blocks_one():
    sizes = [(900, 30), (60, 30), (5, 1), (7, 4), (900, 30)]
    assert kinds_of_blocks(sizes, 4, 8) == [(0, 4), (1,), (2, 3)]


@given(sizes_lists, st.integers(1, 8), st.sampled_from([1, 2, 4]), st.integers(0, 60))
def test_the_division_costs_no_more_than_any_other_with_one_search_each(
    sizes, world_size, align, lane_nbytes
):
    search = make(sizes, world_size, align)
    chosen = search.best((1, 2, 3), 2, lane_nbytes)
    assert sorted(kind for lane in chosen for kind in lane) == list(range(len(search.kinds)))

    def cost(lanes):
        return 2 * sum(map(search.shard, lanes)) + lane_nbytes * len(lanes)

    assert cost(chosen) == min(map(cost, divide(len(search.kinds), 3)))


def test_no_lane_is_searched_twice_and_a_count_ends_the_search(monkeypatch):
    searched = []
    smallest = lane_search.smallest_shard

    def count(group, *, effort):
        searched.append(group)
        return smallest(group, effort=effort)

    monkeypatch.setattr(lane_search, "smallest_shard", count)
    sizes = [(block * 11, block) for block in (7, 9, 10, 11, 13, 16, 17)]
    search = make(sizes, 6)
    for count_of_lanes in (2, 3):
        search.best((count_of_lanes,), 2, 0)
    everything = len(searched)
    assert everything == len(set(searched))
    searched.clear()
    search = make(sizes, 6)
    search.steps = 3
    assert search.best((3,), 2, 0)
    assert 1 <= len(searched) < everything


def test_a_lane_that_saves_less_than_it_costs_is_not_made():
    # One buffer of blocks of 10 and 9 needs padding, two lanes do not.
    sizes = [(1000, 10), (900, 9)]
    search = make(sizes, 5)
    alone = search.shard((0, 1))
    assert alone > 200 + 180
    saved = 2 * (alone - 380)
    assert search.best((1, 2, 3), 2, saved - 1) == ((0,), (1,))
    assert search.best((1, 2, 3), 2, saved) == ((0, 1),)
