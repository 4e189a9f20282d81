# SPDX-License-Identifier: Apache-2.0
"""Reports on stock optimizers over sharded parameters."""

import copy
import gc
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode  # as torch's documentation has it

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.dtensor import DTensor
from vescale.fsdp import Rows, Whole, fully_shard


def inputs(rank, width, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, width, generator=generator).to(DEVICE)


class Odd(nn.Module):
    """Weights that leave some ranks with nothing."""

    def __init__(self):
        super().__init__()
        self.one, self.few = nn.Linear(8, 1, bias=False), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (self.one(x) + self.few(x[:, :4]).sum(1, keepdim=True)) * self.scale


OPTIMIZERS = {
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}


def check_empty_shards(rank, world_size):
    """Ranks without elements step as well; each update is that of one process."""
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        twin = Odd().to(DEVICE)
        model = fully_shard(copy.deepcopy(twin), granularity=Whole() if "SGD" in name else None)
        optimizers = make(list(model.parameters())), make(list(twin.parameters()))
        for step in range(3):
            model(inputs(rank, 8, step)).square().mean().backward()
            for index in range(world_size):
                (twin(inputs(index, 8, step)).square().mean() / world_size).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for key, param in twin.named_parameters():
            got = model.get_parameter(key).full_tensor()
            torch.testing.assert_close(
                got, param.detach(), rtol=1e-4, atol=1e-5, msg=f"{name}: {key}"
            )


def check_in_backward(rank, world_size):
    """A hook steps as soon as a gradient is there, and frees it (row 55)."""
    twin = build().to(DEVICE)
    model = copy.deepcopy(twin)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    plain = copy.deepcopy(model)
    seen = []

    def update(param):
        seen.append(param)
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        losses = [loss_of(m, batch(step, rank, DEVICE)) for m in (model, plain)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(*losses)
        assert all(param.grad is None for param in model.parameters())
    assert len(seen) == 3 * len(list(model.parameters()))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())


def check_against_ddp(rank, world_size):
    """The first ten steps of AdamW are DDP's (row 77)."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)]
    base = nn.Sequential(*layers).to(DEVICE)
    ours = copy.deepcopy(base)
    for layer in ours[::2]:
        fully_shard(layer)
    fully_shard(ours)
    theirs = DistributedDataParallel(base)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    for step in range(10):
        losses = [m(inputs(rank, 64, step)).square().mean() for m in (ours, theirs)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-7)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    before = copy.deepcopy(theirs.module.state_dict())
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param.full_tensor(), before[name], rtol=1e-4, atol=1e-5)


class Operators(TorchDispatchMode):
    """Count operators on plain tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.count += 1
        return func(*args, **(kwargs or {}))


def check_cost_of_many_parameters(rank, world_size):
    """A step of many small parameters costs no more operators than of plain tensors (row 73)."""
    counts = {}
    for shard in (False, True):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(300))).to(DEVICE)
        if shard:
            fully_shard(model)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        optimizer.step()
        with Operators() as operators:
            optimizer.step()
        counts[shard] = operators.count
    assert counts[True] <= 2 * counts[False], counts


def check_objects(rank, world_size):
    """Nothing piles up over steps of foreach AdamW (row 74)."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50))).to(DEVICE)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def count(steps):
        for step in range(steps):
            model(inputs(rank, 4, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return len(gc.get_objects())

    count(5)
    gc.collect()
    gc.disable()
    try:
        before = count(1)
        assert count(40) - before < 40, "less than one object a step"
    finally:
        gc.enable()


def check_all(rank, world_size):
    check_empty_shards(rank, world_size)
    check_in_backward(rank, world_size)
    check_against_ddp(rank, world_size)
    check_cost_of_many_parameters(rank, world_size)
    check_objects(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_stock_optimizers_step_as_in_one_process(run_ranks, world_size):
    run_ranks(check_all, world_size)


# --- checkpoints of another number of ranks -----------------------------------------------------


def stepped(rank, world_size, steps=1, **options):
    model = build().to(DEVICE)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss_of(model, batch(step, 0, DEVICE)).backward()  # alike on all ranks
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_save(rank, world_size, folder):
    dcp.save(
        {"model": stepped(rank, world_size, granularity=Rows(4)).state_dict()}, checkpoint_id=folder
    )


def check_load(rank, world_size, folder):
    model = stepped(rank, world_size, steps=0)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    expected = stepped(rank, world_size)
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.to_local(), b.to_local(), rtol=1e-5, atol=1e-6)


def test_checkpoints_load_on_other_numbers_of_ranks(run_ranks, tmp_path):
    run_ranks(check_save, 4, str(tmp_path / "four"))
    run_ranks(check_load, 3, str(tmp_path / "four"))


# --- row 22: the order of reductions is that of the layout, not of a set ------------------------

TRAIN = """
import sys, torch, torch.distributed as dist
from torch import nn
from vescale.fsdp import fully_shard
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(3 + i, 4 + i) for i in range(8)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(20):
    x = torch.full((2, 3), 0.1 * (rank + 1) * (step + 1))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
total = sum(p.full_tensor().double().sum().item() for p in model.parameters())
print(repr(total), hash("seed"))
dist.destroy_process_group()
"""


def test_ranks_with_other_hash_seeds_reduce_in_one_order(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(rank), str(tmp_path / "store")],
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][1] != outputs[1][1]
