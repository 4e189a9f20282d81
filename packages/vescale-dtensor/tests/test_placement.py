# SPDX-License-Identifier: Apache-2.0
import copy
import pickle

import pytest
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
