# SPDX-License-Identifier: Apache-2.0
from itertools import permutations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vescale.fsdp.packing import Group, encode_runs, free_from, order_fits
from vescale.fsdp.packing_exact import FreePacker, largest_classes

tensors = st.integers(1, 20).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e)))
sizes_lists = st.lists(tensors, min_size=2, max_size=5)


def group_at(sizes, world_size, shard):
    group = Group.of(sizes, world_size, 1)
    assume(all(shard >= free_from(e, g) or shard % g == 0 for e, g in sizes))
    return group


@settings(max_examples=300)
@given(sizes_lists, st.integers(1, 5), st.integers(1, 40))
def test_all_classes_free_fits_exactly_when_a_permutation_fits(sizes, world_size, shard):
    group = group_at(sizes, world_size, shard)
    fits = any(
        order_fits(group, encode_runs(order), shard) for order in set(permutations(group.members))
    )
    runs = FreePacker(range(len(group.classes)), 100_000)(group, shard)
    assert (runs is not None) == fits
    assert runs is None or order_fits(group, runs, shard)


@given(sizes_lists, st.integers(1, 3), st.integers(1, 5), st.integers(1, 40))
def test_two_classes_free_is_the_best_of_their_interleavings(sizes, repeat, world_size, shard):
    sizes = sizes[:3] + sizes[:1] * repeat
    group = group_at(sizes, world_size, shard)
    assume(len(group.classes) > 1)
    pair = largest_classes(group, 2)
    others = [i for i in range(len(group.classes)) if i not in pair]
    others.sort(key=lambda i: -group.classes[i][1])
    before = [i for i in others for _ in range(group.counts[i])]
    mixed = [i for i in group.members if i in pair]
    fits = any(
        order_fits(group, encode_runs([*before, *order]), shard)
        for order in set(permutations(mixed))
    )
    runs = FreePacker(pair, 100_000)(group, shard)
    assert (runs is not None) == fits
    assert runs is None or order_fits(group, runs, shard)


def test_effort_is_a_count_and_ends_the_search():
    group = Group.of([(6, 2)] * 4 + [(5, 5)] * 3, 4, 1)
    packer = FreePacker((0, 1), 100)
    assert packer(group, 10) is not None
    spent = 100 - packer.effort
    assert 0 < spent <= 2 * 5 * 4  # classes, times sets of tensors
    assert FreePacker((0, 1), spent)(group, 10) is not None
    packer = FreePacker((0, 1), spent - 1)
    assert packer(group, 10) is None
    assert packer(group, 1000) is None, "spent on the first call"


@given(st.integers(1, 12), st.integers(1, 12), st.integers(8, 12))
def test_a_narrow_search_is_linear_and_what_it_finds_fits(first, second, shard):
    group = Group.of([(6, 2)] * first + [(8, 4)] * second, 9, 1)
    packer = FreePacker((0, 1), 10_000, width=2)
    runs = packer(group, shard)
    assert 10_000 - packer.effort <= 2 * 2 * (first + second)
    assert runs is None or order_fits(group, runs, shard)
    if runs is not None:
        assert FreePacker((0, 1), 10_000)(group, shard) is not None


def test_the_two_classes_are_those_with_the_most_elements_in_real_blocks():
    biases, experts, scales = [(64, 1)] * 100, [(60, 12)] * 3 + [(40, 20)] * 4, [(96, 4)]
    group = Group.of(biases + experts + scales, 8, 1)
    assert {group.classes[index] for index in largest_classes(group, 2)} == {(60, 12), (40, 20)}
