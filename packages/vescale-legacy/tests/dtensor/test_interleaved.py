# SPDX-License-Identifier: Apache-2.0
"""Interleaved order, and split and cat that communicate nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from testing.collectives import CountCollectives
from testing.ranks import DEVICE
from vescale.legacy.dtensor import (
    InterleavedShard,
    Replicate,
    Shard,
    distribute_tensor,
    redistribute_dtensor,
)
from vescale.legacy.dtensor.interleaved import InterleavedOps, cat, cut_order, gather_order, split

S0, R = Shard(0), Replicate()


def IS(pieces):
    return InterleavedShard(0, pieces)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))
def test_even_cuts_of_the_new_order_are_the_interleaved_parts(pieces, ranks, each, dim):
    shape = [2, 2, 2]
    shape[dim] = pieces * ranks * each
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    parts = cut_order(x, dim, pieces, ranks).chunk(ranks, dim)
    for rank, part in enumerate(parts):
        mine = [piece.chunk(ranks, dim)[rank] for piece in x.chunk(pieces, dim)]
        assert torch.equal(part, torch.cat(mine, dim))
    assert torch.equal(gather_order(torch.cat(parts, dim), dim, pieces, ranks), x)


def whole(x):
    return redistribute_dtensor(x, placements=[R] * x.device_mesh.ndim).to_local() + 0


def check_split_and_cat(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    x = torch.arange(24.0 * world_size, device=DEVICE).view(-1, 2)
    n = x.size(0)
    merged = distribute_tensor(x, mesh, [IS(3)]).requires_grad_()
    with CountCollectives() as comm:
        q, k, v = split(merged, n // 3)
        first, rest = split(merged, [n // 3, 2 * n // 3], dim=-2)
        again = cat([q, k, v])
        mixed = cat([first, rest])
    assert not comm.counts
    assert q.placements == first.placements == (S0,)
    assert rest.placements == (IS(2),)
    assert again.placements == mixed.placements == (IS(3),)
    for part, expected in zip((q, k, v), x.chunk(3), strict=True):
        assert torch.equal(whole(part), expected)
    assert torch.equal(whole(rest), x[n // 3 :])
    assert torch.equal(whole(again), x)
    assert torch.equal(again.to_local(), merged.to_local())
    (k * 2).sum().backward()
    assert merged.grad.placements == (IS(3),)
    rows = whole(merged.grad)[:, 0].view(3, -1)
    assert rows.unique(dim=1).flatten().tolist() == [0.0, 2.0, 0.0]
    with pytest.raises(ValueError, match="multiple of the piece"):
        split(merged, n // 6)
    with pytest.raises(ValueError, match="exactly one"):
        split(merged, 1, dim=1)
    with pytest.raises(ValueError, match="exactly one mesh dim"):
        cat([q, redistribute_dtensor(k, mesh, [R])])
    with pytest.raises(ValueError, match="pieces must be of one size"):
        cat([q, distribute_tensor(x, mesh, [S0])])


def test_split_and_cat_move_nothing(run_ranks):
    run_ranks(check_split_and_cat, 2)


def check_mode(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    x = torch.arange(24.0 * world_size, device=DEVICE).view(-1, 2)
    merged = distribute_tensor(x, mesh, [IS(3)])
    even = distribute_tensor(x, mesh, [S0])
    n = x.size(0)
    with InterleavedOps():
        with CountCollectives() as comm:
            parts = (torch.split(merged, n // 3), merged.split([n // 3] * 3), merged.chunk(3))
            joined = torch.cat([even, even]), torch.cat([merged, merged], dim=0)
        assert not comm.counts
        assert all(part.placements == (S0,) for group in parts for part in group)
        assert [y.placements for y in joined] == [(IS(2),), (IS(6),)]
        # Not ours: these are torch's, by whatever way it takes.
        assert torch.equal(whole(torch.cat([even, even], dim=1)), torch.cat([x, x], 1))
        assert torch.equal(whole(torch.split(even, 1, dim=1)[1]), x[:, 1:])
        assert torch.equal(torch.cat([x, x]), torch.cat((x, x), dim=0))
    assert torch.equal(whole(joined[0]), torch.cat([x, x]))
    assert torch.equal(whole(joined[1]), torch.cat([x, x]))


def test_torchs_functions_take_this_way_while_the_mode_is_open(run_ranks):
    run_ranks(check_mode, 2)
