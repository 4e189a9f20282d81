# SPDX-License-Identifier: Apache-2.0
"""The parts of random DTensors are those of one device, and dropout's too."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from testing.ranks import DEVICE
from vescale.dtensor.random import get_mode
from vescale.legacy.dtensor import (
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    ones,
    rand,
    randn,
    redistribute_dtensor,
)
from vescale.legacy.dtensor import random as legacy_random
from vescale.legacy.dtensor.random import is_rng_supported_mesh, manual_seed

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def full(x):
    return redistribute_dtensor(x, placements=[R] * x.device_mesh.ndim).to_local() + 0


def check_draws(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2))
    for placements in (
        [R, R],
        [S0, R],
        [S0, S1],
        [S1, R],
        [R, Partial()],
        [R, InterleavedShard(0, 2)],
    ):
        manual_seed(7, mesh)
        drawn = rand(8, 6, device_mesh=mesh, placements=placements)
        more = randn((8, 6), device_mesh=mesh, placements=placements, requires_grad=True)
        assert more.requires_grad
        assert more.is_leaf
        x = ones(
            8, 6, device_mesh=mesh, placements=[R if p.is_partial() else p for p in placements]
        )
        x.requires_grad_()
        dropped = F.dropout(x, 0.5)
        dropped.sum().backward()
        torch.manual_seed(7)
        assert torch.equal(full(drawn), torch.rand(8, 6, device=DEVICE))
        assert torch.equal(full(more.detach()), torch.randn(8, 6, device=DEVICE))
        expected = F.dropout(torch.ones(8, 6, device=DEVICE), 0.5)
        assert torch.equal(full(dropped.detach()), expected)
        assert torch.equal(full(x.grad), expected)


def test_one_stream_for_all_layouts(run_ranks):
    run_ranks(check_draws, 4, exact=True)


def check_seeds(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    with pytest.raises(RuntimeError, match="different seed values"):
        manual_seed(rank, mesh)
    patch = pytest.MonkeyPatch()
    patch.setenv("VESCALE_SINGLE_DEVICE_RAND", "0")
    manual_seed(1, mesh)
    assert get_mode() == "off"
    assert type(legacy_random._rng_tracker) is legacy_random.OffsetBasedRNGTracker
    assert not legacy_random._rng_tracker.distribute_region_enabled
    patch.undo()
    manual_seed(1, mesh, tp_dim=0)
    assert get_mode() == "device"
    assert legacy_random._rng_tracker.get_seed("parallel-rng") == 1
    assert legacy_random._rng_tracker.distribute_region_enabled
    with pytest.raises(RuntimeError, match="no random stream 'other'"):
        legacy_random._rng_tracker.get_seed("other")
    torch.manual_seed(5 + rank)
    tracker = legacy_random.init_vescale_rng_tracker(DEVICE)
    assert type(tracker) is legacy_random.ThreadBasedRNGTracker
    assert tracker.get_seed("parallel-rng") == torch.initial_seed() == 5
    with pytest.raises(NotImplementedError, match="'meta': expected a device type"):
        legacy_random.init_vescale_rng_tracker("meta")
    assert is_rng_supported_mesh(mesh)
    nowhere = init_device_mesh("meta", (world_size,))
    with pytest.raises(NotImplementedError, match="expected a device type"):
        manual_seed(1, nowhere)
    with pytest.warns(UserWarning, match="not supported"):
        assert not is_rng_supported_mesh(nowhere)
    assert distribute_tensor(torch.ones(2, device=DEVICE), mesh, [R]).shape == (2,)


def test_seeds_must_agree(run_ranks):
    run_ranks(check_seeds, 2, exact=True)
