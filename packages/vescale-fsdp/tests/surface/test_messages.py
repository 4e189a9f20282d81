# SPDX-License-Identifier: Apache-2.0
"""What a user of FSDP2 does first that cannot work here, and what the error says to do."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.dtensor import distribute_tensor
from vescale.fsdp import fully_shard


def check_matrix_optimizers(rank, world_size):
    for make in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS):
        model = fully_shard(build().to(DEVICE))
        loss_of(model, batch(0, rank, DEVICE)).backward()
        optimizer = make([p for p in model.layers.parameters() if p.ndim == 2])
        with pytest.raises(NotImplementedError, match=r"vescale\.fsdp\.optim\.Muon"):
            optimizer.step(*([lambda: 0.0] if make is torch.optim.LBFGS else []))


def check_outside_of_forward(rank, world_size):
    model = fully_shard(nn.Sequential(nn.Linear(6, 8)).to(DEVICE))
    ones = torch.ones(2, 6, device=DEVICE)
    for use in (lambda: model[0](ones), lambda: model[0].weight[0], lambda: model[0].weight.T):
        with pytest.raises(NotImplementedError, match="register_fsdp_forward_method, or unshard"):
            use()
    assert model[0].weight.full_tensor()[0].shape == (6,)


def check_plain_operands(rank, world_size):
    """What the message names for a parameter under fully_shard works."""
    model = fully_shard(nn.Sequential(nn.Linear(6, 8)).to(DEVICE))
    ones = torch.ones(8, 6, device=DEVICE)
    for use in (lambda p: p + ones, lambda p: ones * p, lambda p: p == ones):
        match = r"under fully_shard, full_tensor\(\) .* to_local\(\) .* unshard\(\) lasts"
        with pytest.raises(NotImplementedError, match=match):
            use(model[0].weight)
    whole = model[0].weight.full_tensor() + ones
    assert model[0].weight.to_local().ndim == 1
    model.unshard()
    assert torch.equal(model[0].weight + ones, whole)
    model.reshard()


def check_ddp(rank, world_size):
    """DistributedDataParallel around the model, or around a model with wrapped blocks in it."""
    blocks = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).to(DEVICE)
    fully_shard(blocks[0])
    for model in (fully_shard(nn.Sequential(nn.Linear(6, 8)).to(DEVICE)), blocks):
        with pytest.raises(
            NotImplementedError, match=r"DistributedDataParallel around such .*out;"
        ):
            nn.parallel.DistributedDataParallel(model)


def check_replaced(rank, world_size):
    """The remedies that the message names are the ones that work."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    model = fully_shard(nn.Sequential(nn.Linear(6, 8)).to(DEVICE), mesh=mesh)
    param, value = model[0].weight, torch.randn(8, 6, device=DEVICE).fill_(3.0)
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="mixes a plain tensor"):
            param.copy_(value)
        param.copy_(distribute_tensor(value, param.device_mesh, param.placements))
    assert torch.equal(param.full_tensor(), value)
    model.load_state_dict({"0.weight": value + 1, "0.bias": torch.zeros(8, device=DEVICE)})
    assert torch.equal(param.full_tensor(), value + 1)
    model[0].weight = nn.Parameter(value)
    with pytest.raises(RuntimeError, match=r"copy_ refuses plain ones and takes .*distribute_"):
        model(torch.ones(2, 6, device=DEVICE))


def check_meta_root(rank, world_size):
    with torch.device("meta"):
        model = nn.Linear(6, 8)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"'\(root\)' .*init_empty\(model\) or load_full_state"):
        model(torch.ones(2, 6, device=DEVICE))


def check_all(rank, world_size):
    check_matrix_optimizers(rank, world_size)
    check_outside_of_forward(rank, world_size)
    check_plain_operands(rank, world_size)
    check_ddp(rank, world_size)
    check_replaced(rank, world_size)
    check_meta_root(rank, world_size)


def test_errors_name_what_works(run_ranks):
    run_ranks(check_all, 2)
