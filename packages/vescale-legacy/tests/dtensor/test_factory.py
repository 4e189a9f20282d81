# SPDX-License-Identifier: Apache-2.0
"""Factories fill this rank's part only, with the values that the whole has there."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from testing.ranks import DEVICE
from vescale.legacy.dtensor import (
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    arange,
    distribute_tensor,
    empty,
    full,
    ones,
    redistribute_dtensor,
    zeros,
)

R, P, S0 = Replicate(), Partial(), Shard(0)


def check_factories(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    for placement in (R, S0, Shard(1), P):
        options = {"device_mesh": mesh, "placements": [placement]}
        for made, expected in (
            (zeros(5, 3, **options), torch.zeros(5, 3)),
            (ones((5, 3), dtype=torch.int64, **options), torch.ones(5, 3, dtype=torch.int64)),
            (full([5, 3], 7.0, **options), torch.full((5, 3), 7.0)),
        ):
            assert made.placements == (placement,)
            assert torch.equal(redistribute_dtensor(made, mesh, [R]).to_local().cpu(), expected)
            cut = distribute_tensor(expected.to(DEVICE), mesh, [placement])
            assert torch.equal(made.to_local(), cut.to_local())
        assert empty(5, 3, **options).to_local().shape == cut.to_local().shape
    for placement in (R, S0, P, InterleavedShard(0, 2)):
        line = arange(2, 26, 2, dtype=torch.float32, device_mesh=mesh, placements=[placement])
        assert line.shape == (12,)
        cut = distribute_tensor(torch.arange(2.0, 26, 2, device=DEVICE), mesh, [placement])
        assert torch.equal(line.to_local(), cut.to_local())
    with mesh:
        made = zeros(4, requires_grad=True)
    assert (made.placements, made.requires_grad, made.is_leaf) == ((R,), True, True)
    with pytest.raises(ValueError, match=r"torch\.strided"):
        zeros(4, layout=torch.sparse_coo, device_mesh=mesh)
    with pytest.raises(ValueError, match="do not divide"):
        zeros(3, device_mesh=mesh, placements=[InterleavedShard(0, 2)])


def test_each_rank_has_its_part(run_ranks):
    run_ranks(check_factories, 2, exact=True)
