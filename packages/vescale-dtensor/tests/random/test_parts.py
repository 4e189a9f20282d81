# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from testing.ranks import DEVICE
from vescale.dtensor import RaggedShard, _StridedShard, distribute_tensor
from vescale.dtensor.random import segments
from vescale.dtensor.random.parts import memory_order, strips_of


def check_segments(rank, world_size):
    """Against brute force: what distribute_tensor gives of ascending numbers."""
    line = init_device_mesh(DEVICE, (world_size,))
    square = init_device_mesh(DEVICE, (2, 2))
    units = RaggedShard((0, 1), (5, 0, 12, 3))
    for shape in ((5, 4), (4, 5), (1, 20), (2, 2, 5)):
        whole = torch.arange(20.0, device=DEVICE).view(shape)
        for mesh, placements in (
            (line, [Shard(0)]),
            (line, [Shard(1)]),
            (line, [Replicate()]),
            (square, [Shard(0), Shard(1)]),
            (square, [Shard(1), Shard(0)]),
            (square, [Shard(1), Shard(1)]),
            (square, [Replicate(), Shard(0)]),
            (square, [_StridedShard(0, split_factor=2), Shard(0)]),
            (line, [units if len(shape) == 2 else RaggedShard((0, 1, 2), (5, 0, 12, 3))]),
            (square, [RaggedShard((0,), (1, 0)), Shard(1)]),
            (square, [Replicate(), RaggedShard((0,), (0, 1))]),
        ):
            if isinstance(placements[0], _StridedShard):
                if shape[0] % 4:  # torch does not cut it
                    continue
                x = torch_distribute_tensor(whole, mesh, placements, src_data_rank=None)
            else:
                x = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            found = [i for start, n in segments(x) for i in range(start, start + n)]
            assert found == x.to_local().flatten().tolist(), (shape, placements)
            assert segments(x, rank) == segments(x) == segments(x._spec)
            assert all(sum(a) < b[0] for a, b in itertools.pairwise(segments(x)))
    outside = init_device_mesh(DEVICE, (world_size,))
    x = distribute_tensor(torch.ones(4), outside, [Shard(0)])
    assert segments(x, world_size + 3) == []
    assert segments(x, 1) == [(1, 1)]


def test_segments_are_those_of_distribute_tensor(run_ranks):
    run_ranks(check_segments, 4, exact=True)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=2),
    st.lists(st.integers(1, 4), min_size=2, max_size=2),
)
def test_ranks_divide_a_tensor(shape, dims, sizes):
    placements = [Shard(dim % len(shape)) for dim in dims]
    mesh = sizes[: len(placements)]
    held = [
        i
        for coordinate in itertools.product(*map(range, mesh))
        for strip in strips_of(shape, placements, mesh, coordinate)
        for start, n in strip.segments()
        for i in range(start, start + n)
    ]
    assert sorted(held) == list(range(torch.Size(shape).numel()))


@given(st.permutations(range(3)), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_the_order_in_memory_is_read_from_strides(order, shape):
    x = torch.empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(3)])
    found = memory_order(x.shape, x.stride())
    assert x.permute(found or [0, 1, 2]).is_contiguous()


def test_what_has_no_order_or_no_values_is_refused():
    with pytest.raises(NotImplementedError, match="share memory; call contiguous"):
        memory_order((3, 4), (0, 1))
    with pytest.raises(NotImplementedError, match="sums that nobody formed"):
        strips_of((3, 4), [Partial()], (2,), (0,))
    assert strips_of((3, 4), [Shard(0)], (2,), None) == []
    assert strips_of((3, 0), [Shard(0)], (2,), (0,)) == []
