# SPDX-License-Identifier: Apache-2.0
"""Clip, initialise, load and export on hybrid meshes and beside tensor parallelism."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from testing.collectives import CountCollectives
from testing.ranks import DEVICE
from vescale.fsdp import (
    Elements,
    clip_grad_norm_,
    fully_shard,
    init_empty,
    iter_full_parameters,
    load_full_state_dict,
)

MESH = {"mesh_dim_names": ("dp", "tp")}
TP = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)  # in no plan: on the data axis only
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(FeedForward() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(device=DEVICE, seed=0):
    torch.manual_seed(seed)
    with torch.device(device):
        return Net()


def hybrid(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, granularity=Elements())
    return fully_shard(model, mesh=mesh, granularity=Elements())


def tensor_parallel(model, mesh, shard=fully_shard):
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], TP)
        shard(layer, mesh=mesh["dp"])
    return shard(model, mesh=mesh["dp"])


def inputs(rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)).to(DEVICE)


def check(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), **MESH)
    expected = dict(build().named_parameters())
    for how, ranks, mine, groups in (
        (hybrid, range(4), rank, 1),
        (tensor_parallel, range(2), rank // 2, 2),
    ):
        model, reference = how(build(), mesh), build()
        model(inputs(mine)).square().mean().backward()
        for other in ranks:
            (reference(inputs(other)).square().mean() / len(ranks)).backward()
        together = torch.cat([p.grad.flatten().double() for p in reference.parameters()])
        with CountCollectives() as mode:
            total = clip_grad_norm_(model, 0.1)
        assert mode.counts == {"allreduce": groups}, mode.counts
        torch.testing.assert_close(total.double(), together.norm(), rtol=1e-5, atol=0)
        for (name, param), (_, source) in zip(
            model.named_parameters(), reference.named_parameters(), strict=True
        ):
            whole = param.grad.full_tensor()
            torch.testing.assert_close(
                whole, source.grad * (0.1 / (total + 1e-6)), rtol=1e-4, atol=1e-7, msg=name
            )
        found = dict(iter_full_parameters(model))
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())

        state = build(seed=1).state_dict()
        for device in (DEVICE, "meta"):
            model = how(build(device), mesh)
            load_full_state_dict(model, copy.deepcopy(state) if rank == 0 else None)
            found = dict(iter_full_parameters(model, dtype=torch.float64))
            assert all(torch.equal(found[name], value.double()) for name, value in state.items())

        model = how(build("meta"), mesh)
        torch.manual_seed(0 if rank == 0 else 100 + rank)  # the first rank's numbers count
        assert init_empty(model, DEVICE).uninitialised == []
        found = dict(iter_full_parameters(model))
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        model(inputs(mine)).sum().backward()
    # Stock FSDP2 beside tensor parallelism: its strided shards count once too.
    model = tensor_parallel(build(), mesh, fsdp2)
    model(inputs(rank // 2)).square().mean().backward()
    assert any(p.grad.placements != (Shard(0),) for p in model.parameters())
    torch.testing.assert_close(clip_grad_norm_(model, 0.1), total, rtol=1e-5, atol=0)
    found = dict(iter_full_parameters(model))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_helpers_work_on_two_axes(run_ranks):
    run_ranks(check, 4, exact=True)
