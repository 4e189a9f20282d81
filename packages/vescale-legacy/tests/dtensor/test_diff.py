# SPDX-License-Identifier: Apache-2.0
"""Deferred results are reduced once, when their value is needed."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from testing.collectives import CountCollectives
from testing.ranks import DEVICE
from vescale.legacy.dtensor import DTensor, Partial, Replicate, no_implicit_resharding
from vescale.legacy.dtensor._diff import DeferReshardMode, dummy_p2p

R = Replicate()


def check_deferred(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    leaves = [torch.full((4,), float(rank + i), device=DEVICE).requires_grad_() for i in (1, 2)]
    a, b = (DTensor.from_local(x, mesh, [Partial()]) for x in leaves)
    expected = sum(x.detach() for x in leaves)
    torch.distributed.all_reduce(expected)
    with DeferReshardMode() as mode, CountCollectives() as comm, no_implicit_resharding():
        a, b = mode.defer(a, [R]), mode.defer(b, [R])
        total = a + b
        assert total.placements == (Partial(),)
        assert total.shape == (4,)
        assert not comm.counts
        out = torch.relu(total)
        assert sum(comm.counts.values()) == 1
        both = mode.resolve({"x": total, "y": 3})
    assert out.placements == both["x"].placements == (R,)
    torch.testing.assert_close(out.to_local() + 0, torch.relu(expected))
    out.to_local().sum().backward()
    assert all(x.grad.tolist() == [1.0] * 4 for x in leaves)
    with pytest.raises(RuntimeError, match="implicit resharding"), no_implicit_resharding():
        torch.relu(a)  # the mode has closed


def test_two_sums_are_reduced_once(run_ranks):
    run_ranks(check_deferred, 2)


def test_dummy_p2p(monkeypatch):
    send = dummy_p2p(lambda x: x + 1)
    assert send(1) == 2
    monkeypatch.setenv("VESCALE_DUMMY_P2P", "1")
    assert send(1) is None
