# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of sharded logits, as one device computes it."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from testing.ranks import DEVICE
from vescale.legacy.dtensor import Replicate, Shard, distribute_tensor, loss_parallel


def check_loss(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    torch.manual_seed(0)
    for shape, reduction, weighted in (
        ((6, 10), "mean", False),
        ((6, 10), "sum", True),
        ((2, 7, 3), "none", False),
    ):
        logits = torch.randn(shape, device=DEVICE, requires_grad=True)
        target = torch.randint(shape[1], (shape[0], *shape[2:]), device=DEVICE)
        weight = torch.rand(shape[1], device=DEVICE) if weighted else None
        expected = F.cross_entropy(logits, target, weight, reduction=reduction)
        expected.sum().backward()
        cut = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
        heavy = distribute_tensor(weight, mesh, [Replicate()]) if weighted else None
        with loss_parallel():
            loss = F.cross_entropy(cut, target, heavy, reduction=reduction)
            loss.sum().backward()
        assert loss.placements == (Replicate(),)
        assert cut.grad.placements == (Shard(1),)
        torch.testing.assert_close(loss.to_local() + 0, expected.detach())
        torch.testing.assert_close(cut.grad.full_tensor() + 0, logits.grad)
    wrong = distribute_tensor(torch.randn(6, 10, device=DEVICE), mesh, [Shard(0)])
    target = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="loss_parallel"), loss_parallel():
        F.cross_entropy(wrong, target)
    with loss_parallel():  # the one before closed, although it raised
        pass


def test_the_loss_of_sharded_logits_is_that_of_one_device(run_ranks):
    run_ranks(check_loss, 2)
