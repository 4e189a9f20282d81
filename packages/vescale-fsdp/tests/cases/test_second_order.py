# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients over several units, beside an unsharded twin."""

import copy

import pytest
import torch
from torch import nn

from testing.ranks import DEVICE
from vescale.fsdp import fully_shard

WIDTH = 6


def penalty(model, x, *, first):
    (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return (g.norm(dim=1) - 1).square().sum()


def penalty_of_a_penalty(model, x, *, first):
    """Backward uses weights that another backward saved, while it gathers units ahead."""
    (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=not first, retain_graph=True)
    return (g.norm(dim=1) - 1).square().sum() + h.square().sum()


LOSSES = [penalty, penalty_of_a_penalty]


def check_losses(rank, world_size):
    for loss in LOSSES:
        for reshard in (True, False):
            torch.manual_seed(0)
            twin = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).to(DEVICE)
            model = copy.deepcopy(twin)
            fully_shard(model[0], reshard_after_forward=reshard)
            fully_shard(model, reshard_after_forward=reshard)
            for step in range(3):
                for m in (model, twin):
                    m.zero_grad()
                    torch.manual_seed(step)
                    x = torch.randn(world_size, 4, WIDTH).to(DEVICE)
                    parts = x[rank : rank + 1] if m is model else x
                    for part in parts:
                        part.requires_grad_()
                        total = loss(m, part, first=step == 0) + m(part).sum()
                        total.backward()
                for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(
                        p.grad.full_tensor(), q.grad / world_size, msg=lambda m, n=name: f"{n}: {m}"
                    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_of_gradients_over_several_units(run_ranks, world_size):
    run_ranks(check_losses, world_size)
