# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from testing.ranks import DEVICE
from vescale.dtensor import RaggedShard, distribute_tensor

LOSSES = [
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    lambda x, y, **how: F.huber_loss(x, y, delta=0.2, **how),
    F.soft_margin_loss,
    F.binary_cross_entropy,
    lambda x, y, **how: F.binary_cross_entropy(x, y, weight=y, **how),
    F.binary_cross_entropy_with_logits,
    lambda x, y, **how: F.kl_div(x.log(), y, **(how | {"reduction": "sum"})),
]


def check_losses(rank, world_size):
    line, square = init_device_mesh(DEVICE, (4,)), init_device_mesh(DEVICE, (2, 2))
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(8, 6, generator=generator).to(DEVICE) for _ in "xy")
    for mesh, placements, loss, how in [
        *itertools.product(
            [line], [[RaggedShard((0,), (2, 0, 1, 1))]], LOSSES, ("mean", "sum", "none")
        ),
        *itertools.product(
            [square], [[RaggedShard((0,), (1, 3)), Shard(1)]], LOSSES, ("mean", "none")
        ),
    ]:
        a = x.clone().requires_grad_()
        b = distribute_tensor(x, mesh, placements).requires_grad_()
        expected = loss(a, y, reduction=how)
        for other in (placements, [Replicate()] * mesh.ndim):
            b.grad = a.grad = None
            found = loss(b, distribute_tensor(y, mesh, other), reduction=how)
            torch.testing.assert_close(found.full_tensor(), expected)
            expected.square().sum().backward(retain_graph=True)
            found.square().sum().backward()
            torch.testing.assert_close(b.grad.full_tensor(), a.grad)
            assert b.grad.placements == tuple(placements)
    with pytest.raises(NotImplementedError, match="mixes a plain tensor"):
        F.mse_loss(b, y)


def test_losses_equal_those_of_one_process(run_ranks):
    run_ranks(check_losses, 4, exact=True)
