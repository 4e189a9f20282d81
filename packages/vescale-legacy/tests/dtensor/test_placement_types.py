# SPDX-License-Identifier: Apache-2.0
"""Old constructors give torch's placements, which old questions understand."""

import copy
import pickle

import pytest
import torch.distributed as dist
import torch.distributed.tensor as stock

from vescale.legacy.dtensor.placement_types import (
    InterleavedShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    interleaved_size,
    is_interleaved_shard,
    is_sharded,
    serialize_from_tensor,
    serialize_to_tensor,
    shard_dim,
    short_name,
)

ALL = (Replicate(), Partial(), Shard(0), Shard(2), InterleavedShard(0, 2), InterleavedShard(1, 3))


@pytest.mark.parametrize("name", ["SUM", "AVG", "MAX", "MIN", "PRODUCT"])
def test_partial_takes_the_ops_of_c10d(name):
    made = Partial(getattr(dist.ReduceOp, name))
    assert made == stock.Partial(name.lower()) == Partial(name.lower())
    assert isinstance(made, Partial)
    assert isinstance(made, stock.Partial)
    assert (Partial() == made) == (name == "SUM")


@pytest.mark.parametrize("op", ["median", dist.ReduceOp.BXOR, None])
def test_other_reductions_are_refused(op):
    with pytest.raises(ValueError, match="expected one of"):
        Partial(op)


def test_an_interleaved_shard_is_a_placement_of_torch():
    placement = InterleavedShard(1, 4)
    assert isinstance(placement, InterleavedShard)
    assert isinstance(placement, Placement)
    assert not isinstance(Shard(1), InterleavedShard)
    assert not isinstance(Replicate(), InterleavedShard)
    assert placement == InterleavedShard(1, 4) != InterleavedShard(1, 2)
    assert placement != Shard(1)
    assert InterleavedShard(1, 1) != Shard(1)
    assert len({placement, InterleavedShard(1, 4), InterleavedShard(0, 4)}) == 2
    assert copy.deepcopy(placement) == pickle.loads(pickle.dumps(placement)) == placement


def test_questions_about_placements():
    placement = InterleavedShard(1, 4)
    assert is_interleaved_shard(placement, 1, 4)
    assert not is_interleaved_shard(placement, 0)
    assert not is_interleaved_shard(placement, 1, 2)
    assert not is_interleaved_shard(Shard(1))
    assert (interleaved_size(placement), interleaved_size(Shard(0))) == (4, 1)
    assert is_sharded(placement, 1)
    assert is_sharded(Shard(1))
    assert not is_sharded(Shard(1), 0)
    assert [shard_dim(p) for p in ALL] == [None, None, 0, 2, 0, 1]
    assert [short_name(p) for p in ALL] == ["R", "P", "S(0)", "S(2)", "IS(0,2)", "IS(1,3)"]
    with pytest.raises(ValueError, match="cuts no dim"):
        interleaved_size(Replicate())


@pytest.mark.parametrize("pieces", [0, -1, 1.5, None])
def test_a_wrong_number_of_pieces_is_refused(pieces):
    with pytest.raises(ValueError, match="positive int"):
        InterleavedShard(0, pieces)


def test_codes_of_placements():
    codes = [serialize_to_tensor(placement).tolist() for placement in ALL]
    assert codes == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [2, 2, 0], [3, 0, 2], [3, 1, 3]]
    assert [serialize_from_tensor(serialize_to_tensor(p)) for p in ALL] == list(ALL)
    with pytest.raises(ValueError, match="no code"):
        serialize_to_tensor(Partial("max"))
    with pytest.raises(ValueError, match="0 to 3"):
        serialize_from_tensor(serialize_to_tensor(Replicate()) + 7)
