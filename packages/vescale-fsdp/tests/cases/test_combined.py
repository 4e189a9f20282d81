# SPDX-License-Identifier: Apache-2.0
"""Meshes, offloading and whole states together, through two steps, beside an unsharded twin."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import (
    CPUOffloadPolicy,
    OffloadPolicy,
    clip_grad_norm_,
    fully_shard,
    iter_full_parameters,
    load_full_state_dict,
    no_sync,
    register_fsdp_forward_method,
)

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def model_of(seed):
    """Return a model whose layers two tensor-parallel ranks divide."""
    model = build(seed, width=12, layers=2)
    for layer in model.layers:
        layer.up, layer.down = nn.Linear(12, 18), nn.Linear(18, 12)
    return model.to(DEVICE)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to(DEVICE)


def check_life(rank, shape, offload):
    """``shape`` is (replicas, shards, tensor-parallel ranks)."""
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicas", "shards", "tp"))
    options = {"mesh": mesh["replicas", "shards"], "offload_policy": offload}
    twin, model = model_of(3), model_of(5)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    load_full_state_dict(model, twin.state_dict() if rank == 0 else {})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for step in range(2):
        with no_sync(model):
            loss_of(model, batch(10 + step, rank // shape[2], DEVICE)).backward()
        loss_of(model, batch(step, rank // shape[2], DEVICE)).backward()
        ranks = shape[0] * shape[1]
        for each in range(ranks):
            for index in (step, 10 + step):
                (loss_of(twin, batch(index, each, DEVICE)) / ranks).backward()
        norm = whole(clip_grad_norm_(model, 0.3))
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.3))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = dict(iter_full_parameters(model, bucket_bytes=1000))
    for name, param in twin.named_parameters():
        torch.testing.assert_close(whole(found[name]), param.detach(), msg=name)


def check_lives(rank, world_size):
    for shape, offload in (
        ((2, 1, 2), CPUOffloadPolicy()),
        ((1, 2, 2), CPUOffloadPolicy()),
        ((2, 2, 1), CPUOffloadPolicy()),
        ((2, 1, 2), OffloadPolicy()),
    ):
        check_life(rank, shape, offload)


def test_replicas_tensor_parallelism_and_offloading_go_together(run_ranks):
    run_ranks(check_lives, 4, exact=True)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.first(x)

    def encode(self, x):
        return self.second(self(x)).tanh()

    def both(self, x):
        return self.encode(x) + self.forward(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = Inner(), nn.Linear(5, 5)

    def forward(self, x):
        return self.head(self.inner.both(x))

    def twice(self, x):
        return self.inner.encode(self.inner.encode(x)) * self.head(x)

    def loss(self, x):
        return self.forward(x).square().sum() + self.twice(x).sum()


def check_methods(rank, world_size):
    """Registered methods that call each other, and forward, of one unit and of several."""
    twin, model = Outer().to(DEVICE), Outer().to(DEVICE)
    fully_shard(model.inner)
    fully_shard(model)
    for module, names in ((model.inner, ("encode", "both")), (model, ("twice", "loss"))):
        for name in names:
            register_fsdp_forward_method(module, name)

    def total(module, index):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(index)).to(DEVICE)
        return module.loss(x) + module(x).sum() + module.inner.both(x).sum()

    for _ in range(2):
        total(model, rank).backward()
        for index in range(world_size):
            (total(twin, index) / world_size).backward()
    for name, param in twin.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, param.grad, msg=name)


def test_registered_methods_call_each_other(run_ranks):
    run_ranks(check_methods, 2)
