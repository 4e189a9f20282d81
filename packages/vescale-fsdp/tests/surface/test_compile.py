# SPDX-License-Identifier: Apache-2.0
"""``torch.compile`` around, inside and before ``fully_shard``: numbers of eager, stable guards."""

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import FSDPModule, fully_shard

BACKEND = "eager"  # what is compiled, and when, is the same for all backends
AUTOGRAD = "aot_eager"  # with the backward of a real one, but without a C++ compiler


def language_model(how, backend=BACKEND):
    model = build(layers=2).to(DEVICE)
    for index, layer in enumerate(model.layers):
        if how == "block.compile() first":
            layer.compile(backend=backend, fullgraph=True)
        if how == "torch.compile(block) first":
            layer = model.layers[index] = torch.compile(layer, backend=backend, fullgraph=True)
        fully_shard(layer)
        if how == "block.compile() after":
            layer.compile(backend=backend, fullgraph=True)
        if how == "torch.compile(block) after":
            model.layers[index] = torch.compile(layer, backend=backend)
    fully_shard(model)
    if how == "model.compile()":
        model.compile(backend=backend)
    if how == "torch.compile(model)":
        model = torch.compile(model, backend=backend)
    return model


def work():
    """Return how much was compiled so far."""
    return counters["frames"]["total"], counters["stats"]["unique_graphs"]


def train(model, rank, steps=4):
    """Return the losses; nothing is compiled after the second step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, compiled = [], []
    for step in range(steps):
        loss = loss_of(model, batch(step, rank, DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        compiled.append(work())
    assert len(set(compiled[1:])) == 1, compiled
    return losses


WAYS = [
    "block.compile() first",
    "torch.compile(block) first",
    "block.compile() after",
    "torch.compile(block) after",
    "model.compile()",
    "torch.compile(model)",
]


def check_ways(rank, world_size):
    expected = train(language_model("eager"), rank)
    for how in WAYS:
        torch._dynamo.reset()
        counters.clear()
        backend = AUTOGRAD if how in ("block.compile() first", "torch.compile(model)") else BACKEND
        losses = train(language_model(how, backend), rank)
        assert losses == pytest.approx(expected, rel=1e-6), how
        assert work()[1] > 0, how
        if "block" in how and how != "torch.compile(block) after":
            assert work()[1] == 1, f"{how}: one graph serves all blocks"


def check_a_compiled_step(rank, world_size):
    """Also the backward, with what autograd calls back, runs under the compiler."""
    expected = train(language_model("eager"), rank, 3)
    torch._dynamo.reset()
    counters.clear()
    model = language_model("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend=BACKEND)
    def backward(tokens):
        loss = loss_of(model, tokens)
        loss.backward()
        return loss.detach()

    losses, compiled = [], []
    for step in range(3):
        losses.append(backward(batch(step, rank, DEVICE)).item())
        optimizer.step()
        optimizer.zero_grad()
        compiled.append(work())
    assert losses == pytest.approx(expected, rel=1e-6)
    assert compiled[1] == compiled[2]


class Stage(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x):
        return x + F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Down, middle, up, with a skip connection."""

    def __init__(self, channels=4):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down, self.middle, self.up = (Stage(channels) for _ in range(3))
        self.last = nn.Conv2d(2 * channels, 3, 1)

    def forward(self, x):
        skip = self.down(self.first(x))
        x = self.middle(F.avg_pool2d(skip, 2))
        x = self.up(F.interpolate(x, scale_factor=2.0))
        return self.last(torch.cat([x, skip], 1))


def unet():
    torch.manual_seed(0)
    model = UNet().to(DEVICE)
    for stage in (model.down, model.middle, model.up):
        fully_shard(stage)
    return fully_shard(model)


def check_input_sizes(rank, world_size):
    def losses_of(model):
        losses, compiled = [], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            for size in (8, 12, 16):
                x = torch.linspace(-1, 1, 3 * size * size, device=DEVICE).view(1, 3, size, size)
                loss = model(x + rank).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            compiled.append(work())
        assert compiled[1] == compiled[2], compiled
        return losses

    expected = losses_of(unet())
    torch._dynamo.reset()
    counters.clear()
    model = unet()
    for stage in (model.down, model.middle, model.up):
        stage.compile(backend=BACKEND)
    assert losses_of(model) == pytest.approx(expected, rel=1e-5)
    assert 1 <= work()[1] <= 4, "one graph for the first size, one for all others, and each half"


def check_names(rank, world_size):
    block = torch.compile(nn.Linear(3, 3).to(DEVICE), backend=BACKEND)
    assert isinstance(fully_shard(block), FSDPModule)
    assert list(block.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
    assert torch.equal(block.forward(torch.ones(2, 3)), block(torch.ones(2, 3)))


def check_all(rank, world_size):
    check_ways(rank, world_size)
    check_a_compiled_step(rank, world_size)
    check_input_sizes(rank, world_size)
    check_names(rank, world_size)


def test_compiled_models_train_as_eager_ones_without_compiling_again(run_ranks):
    run_ranks(check_all, 2, limit=400)
