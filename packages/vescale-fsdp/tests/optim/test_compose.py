# SPDX-License-Identifier: Apache-2.0
"""Several optimizers in one loop, with schedulers, a gradient scaler, clipping and a checkpoint."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from testing.ranks import DEVICE
from vescale.dtensor import init_device_mesh
from vescale.fsdp import clip_grad_norm_, fully_shard, granularity_for
from vescale.fsdp.optim import SOAP, AdamW8bit, Muon, split_params


def build(mesh, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(128, 48), nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48), nn.Linear(48, 128)
    ).to(DEVICE)
    fully_shard(model, mesh=mesh, granularity=granularity_for("adamw8bit"))
    matrices, rest = split_params(model)
    names = {param: name for name, param in model.named_parameters()}
    pick = [[(names[p], p) for p in params] for params in (matrices[:2], matrices[2:], rest)]
    optimizers = [Muon(pick[0], lr=0.02), SOAP(pick[1], lr=0.01), AdamW8bit(pick[2], lr=0.01)]
    return model, optimizers


def train(model, optimizers, scaler, rank, steps):
    losses = []
    for step in steps:
        tokens = (torch.arange(16, device=DEVICE) * (3 + rank) + step) % 128
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 128)
        scaler.scale(loss).backward()
        if step == 3 and rank == 1:  # on one rank, in what it holds of every parameter
            for param in model.parameters():
                param.grad.to_local().fill_(torch.inf)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model, 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_loop(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model, optimizers = build(mesh, 0)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0, growth_interval=1000)
    schedulers = [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2) for o in optimizers]
    train(model, optimizers, scaler, rank, range(3))
    for _ in range(2):
        for scheduler in schedulers:
            scheduler.step()
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.02, 0.01, 0.01]

    # A non-finite gradient on one rank skips the step on all.
    before = [param.full_tensor() for param in model.parameters()]
    train(model, optimizers, scaler, rank, [3])
    assert scaler.get_scale() == 128.0
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), old)

    model_state, optimizer_state = get_state_dict(model, optimizers)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    expected = train(model, optimizers, scaler, rank, range(4, 7))

    other, others = build(mesh, 1)
    model_state, optimizer_state = get_state_dict(other, others)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        other, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    scaler = torch.amp.GradScaler(DEVICE, init_scale=128.0, growth_interval=1000)
    assert train(other, others, scaler, rank, range(4, 7)) == expected


def test_optimizers_share_a_loop_a_scaler_and_a_checkpoint(run_ranks, tmp_path):
    run_ranks(check_loop, 2, tmp_path, exact=True)
