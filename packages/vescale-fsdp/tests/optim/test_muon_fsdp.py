# SPDX-License-Identifier: Apache-2.0
"""Muon on the parameters that fully_shard makes, given the gradients that it reduces."""

import logging

import torch
from torch import nn

from testing.ranks import DEVICE
from vescale.dtensor import init_device_mesh
from vescale.fsdp import Rows, fully_shard
from vescale.fsdp.optim import Muon, split_params


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)
        self.spare = nn.Linear(width, width)  # takes part in every other step

    def forward(self, x, spare):
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.spare(x) if spare else x


class Model(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, width), nn.ModuleList()
        self.layers.extend(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, 32, bias=False)

    def forward(self, tokens, spare):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, spare)
        return self.head(x)


def check_training(rank, world_size):
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (world_size,))
    model = Model().to(DEVICE)
    names = [name for name, _ in model.named_parameters()]
    for granularity, part in zip((Rows(1), Rows(4)), model.layers, strict=True):
        fully_shard(part, mesh=mesh, granularity=granularity)
    fully_shard(model, mesh=mesh)
    muon_params, rest = split_params(model)
    named = dict(model.named_parameters())
    assert list(named) == names
    hidden = [name for name in names if name.startswith("layers") and named[name].ndim == 2]
    assert muon_params == [named[name] for name in hidden]
    assert {*muon_params, *rest} == set(named.values())

    references = [nn.Parameter(param.full_tensor().detach().clone()) for param in muon_params]
    muon, adamw = Muon(muon_params, lr=0.05), torch.optim.AdamW(rest, lr=1e-2)
    reference = torch.optim.Muon(references, lr=0.05)
    losses = []
    for step in range(6):
        tokens = torch.arange(8, device=DEVICE) * (rank + 1) % 32
        logits = model(tokens, spare=bool(step % 2))
        loss = nn.functional.cross_entropy(logits, (tokens * 3 + 1) % 32)
        loss.backward()
        for param, whole in zip(muon_params, references, strict=True):
            whole.grad = None if param.grad is None else param.grad.full_tensor()
        for optimizer in (muon, adamw, reference):
            optimizer.step()
            optimizer.zero_grad()
        for param, whole in zip(muon_params, references, strict=True):
            assert torch.equal(param.full_tensor(), whole)
        losses.append(loss.item())
    assert losses[-2] < losses[0]
    assert losses[-1] < losses[1]


def test_sharded_training_gives_the_bits_of_whole_matrices(run_ranks):
    run_ranks(check_training, 3)


def check_warning(rank, world_size):
    """One rank says what the others wait for, where the work cannot be shared evenly."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("vescale.fsdp.optim")
    logger.addHandler(handler)
    one = fully_shard(nn.Linear(64, 64, bias=False).to(DEVICE), granularity=Rows(1))
    Muon(one.parameters())
    assert len(records) == (rank == 0)
    for record in records:
        assert "Muon's exchange: the busiest of 2 ranks computes 2.00" in record.getMessage()
    records.clear()
    two = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))).to(DEVICE)
    Muon(fully_shard(two, granularity=Rows(1)).parameters())
    assert not records
    logger.removeHandler(handler)


def test_work_that_cannot_be_shared_is_told_once(run_ranks):
    run_ranks(check_warning, 2)
