# SPDX-License-Identifier: Apache-2.0
import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from vescale.dtensor.placement import RaggedShard, _StridedRaggedShard, is_ragged_shard


def test_placements_are_values():
    a, b = RaggedShard((0,), (1, 2)), RaggedShard([0], [1, 2])
    assert a == b
    assert hash(a) == hash(b)
    assert {a: 1}[b] == 1
    assert a != RaggedShard((0, 1), (1, 2))
    assert a != RaggedShard((0,), (2, 1))
    assert a != Shard(0)
    assert copy.copy(a) is a
    assert copy.deepcopy([a])[0] is a
    assert pickle.loads(pickle.dumps(a)) == a
    assert repr(a) == str(a) == "RaggedShard(dims=(0,), local_units=(1, 2))"


def test_torch_sees_neither_shard_nor_replicate_nor_partial():
    for placement in (RaggedShard((0,), (1, 2)), _StridedRaggedShard((0,), (1, 2), 2)):
        assert not placement.is_shard()
        assert not placement.is_shard(0)
        assert not placement.is_replicate()
        assert not placement.is_partial()
        assert is_ragged_shard(placement)
    assert not is_ragged_shard(Replicate())


def test_the_strided_name_has_the_same_split_and_is_another_value():
    plain, strided = RaggedShard((0,), (1, 3)), _StridedRaggedShard((0,), (1, 3), split_factor=2)
    assert strided != plain
    assert strided == _StridedRaggedShard((0,), (1, 3), 2)
    assert strided != _StridedRaggedShard((0,), (1, 3), 4)
    assert pickle.loads(pickle.dumps(strided)) == strided
    assert strided.split_factor == 2
    assert strided.split_numels((8, 2)) == plain.split_numels((8, 2)) == (4, 12)
    assert "split_factor=2" in repr(strided)


@pytest.mark.parametrize(
    ("dims", "units", "message"),
    [
        ((1,), (1, 1), "prefix"),
        ((0, 2), (1, 1), "prefix"),
        ((-1,), (1, 1), "prefix"),
        ((0,), (1, -1), "non-negative"),
        ((0,), (0, 0), "positive sum"),
        ((0,), (), "positive sum"),
        ((), (1, 1), "one owner"),
    ],
)
def test_mistakes_name_the_values(dims, units, message):
    with pytest.raises(ValueError, match=message) as error:
        RaggedShard(dims, units)
    assert str(units) in str(error.value) or str(dims) in str(error.value)


def test_units_must_be_integers():
    with pytest.raises(TypeError):
        RaggedShard((0,), (0.5, 0.5))


def test_sizes_are_proportional_to_units():
    ragged = RaggedShard((0,), (1, 0, 3))
    assert ragged.unit_numel((8, 5)) == 10
    assert ragged.split_numels((8, 5)) == (10, 0, 30)
    assert [ragged.split((8, 5), rank) for rank in range(3)] == [(0, 10), (10, 10), (10, 40)]
    assert RaggedShard((0, 1), (3, 7)).split_numels((4, 5)) == (6, 14)
    assert RaggedShard((0,), (1, 1)).split_numels((0, 4)) == (0, 0)


def test_a_single_owner_holds_everything_whatever_its_units():
    whole = RaggedShard((), (0, 1, 0))
    assert whole.owner == 1
    assert whole.split_numels(()) == (0, 1, 0)
    assert whole.split_numels((2, 3)) == (0, 6, 0)
    assert [whole.split((2, 3), rank) for rank in range(3)] == [(0, 0), (0, 6), (6, 6)]
    assert RaggedShard((0,), (0, 3)).split_numels((8,)) == (0, 8)
    assert RaggedShard((0,), (1, 3)).owner is None


def test_a_shape_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"4 units in total.*\(6, 2\).*not a multiple"):
        RaggedShard((0,), (1, 3)).split_numels((6, 2))
    with pytest.raises(ValueError, match="at most 1 dims"):
        RaggedShard((0, 1), (1, 3)).split((8,), 0)
    with pytest.raises(ValueError, match="at most 0 dims"):
        RaggedShard((0,), (0, 1)).split_numels(())


units_of_ranks = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=6
).filter(lambda runs: any(units and ranks for units, ranks in runs))


@given(units_of_ranks, st.integers(0, 3), st.sampled_from([(0,), (0, 1)]))
def test_runs_and_plain_units_are_one_value(runs, factor, dims):
    units = tuple(count for count, ranks in runs for _ in range(ranks))
    plain, encoded = RaggedShard(dims, units), RaggedShard.from_runs(dims, runs)
    assert plain == encoded
    assert hash(plain) == hash(encoded)
    assert encoded.local_units == units
    assert encoded.axis_size == len(units)
    assert eval(repr(encoded)) == encoded
    assert pickle.loads(pickle.dumps(encoded)) == encoded
    owners = [rank for rank, count in enumerate(units) if count]
    assert encoded.owner == (owners[0] if len(owners) == 1 else None)
    shape = (sum(units) * factor, 2, 1)
    numels = [2 * factor * count for count in units]
    if encoded.owner is not None:
        numels = [sum(numels) if rank == encoded.owner else 0 for rank in range(len(units))]
    assert encoded.split_numels(shape) == tuple(numels)
    ranges = [encoded.split(shape, rank) for rank in range(len(units))]
    assert ranges == [(sum(numels[:r]), sum(numels[: r + 1])) for r in range(len(units))]
    other = (units[0] + 1, *units[1:])
    assert encoded != RaggedShard(dims, other)


def test_nothing_in_a_placement_of_ten_thousand_ranks_is_long():
    ragged = RaggedShard((0,), [3] * 5000 + [1] + [0] * 5239)
    assert ragged.axis_size == 10240
    assert ragged.runs == ((3, 5000), (1, 1), (0, 5239))
    assert repr(ragged) == (
        "RaggedShard(dims=(0,), local_units=(3,) * 5000 + (1,) * 1 + (0,) * 5239)"
    )
    assert len(pickle.dumps(ragged)) < 200
    assert ragged.split((15001, 7), 9000) == (15001 * 7, 15001 * 7)


@pytest.mark.parametrize(
    ("runs", "error", "message"),
    [
        ([(1, -1)], ValueError, "negative number of ranks"),
        ([(-1, 3)], ValueError, "non-negative"),
        ([(0, 3)], ValueError, "positive sum"),
        ([], ValueError, "positive sum"),
        ([1, 2], TypeError, "pairs of ints"),
        ([(0.5, 2)], TypeError, "pairs of ints"),
    ],
)
def test_mistakes_in_runs_name_them(runs, error, message):
    with pytest.raises(error, match=message):
        RaggedShard.from_runs((0,), runs)
