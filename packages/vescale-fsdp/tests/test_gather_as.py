# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from testing.collectives import CountCollectives
from testing.ranks import DEVICE
from vescale.fsdp import (
    BlockScaled,
    Elements,
    MixedPrecisionPolicy,
    Rows,
    Whole,
    clip_grad_norm_,
    fully_shard,
    iter_full_parameters,
)
from vescale.fsdp.units import param_groups

FORMS = (BlockScaled(), BlockScaled(torch.float8_e4m3fn, 128), BlockScaled(torch.int8, 16))


class Block(nn.Module):
    """Matrices with odd sizes, fused experts, a bias and a small matrix that travels as it is."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(48, 133)
        self.experts = nn.Parameter(torch.randn(3, 133, 40) / 12)
        self.down = nn.Linear(120, 48, bias=False)
        self.gate = nn.Linear(48, 48, bias=False)  # 2304 elements

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        mixed = torch.einsum("bi,eio->beo", hidden, self.experts).flatten(1)
        return x + self.down(mixed) * torch.sigmoid(self.gate(x))


class Straight(torch.autograd.Function):
    """Rounded forward, the gradient as it is: what one process computes with."""

    @staticmethod
    def forward(ctx, param, form, dtype):
        return form.round(param).to(dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class Rounding(nn.Module):
    def __init__(self, form, dtype):
        super().__init__()
        self.form, self.dtype = form, dtype

    def forward(self, param):
        return Straight.apply(param, self.form, self.dtype)


def one_process(model, form, dtype):
    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            nn.utils.parametrize.register_parametrization(
                module, name, Rounding(form, dtype), unsafe=True
            )
    return model


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(48, 7))


def inputs(step):
    return torch.randn(12, 48, generator=torch.Generator().manual_seed(step)).to(DEVICE)


def wrap(model, **options):
    for layer in (*model, model):
        fully_shard(layer, **options)
    return model


def train(model, steps, part, dtype=torch.float32):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for step in range(steps):
        loss = model(inputs(step).chunk(part[1])[part[0]].to(dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if part[1] > 1:
        dist.all_reduce(losses)
    return losses / part[1]


def check_equal_to_one_process(rank, world_size, form):
    mesh = init_device_mesh(DEVICE, (world_size,))
    for dtype, kinds, tolerance in (
        (torch.float32, ({}, {"granularity": Whole()}, {"lanes": 2}), (2e-5, 1e-6)),
        (torch.bfloat16, ({},), (3e-2, 1e-3)),
    ):
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        twin = one_process(build(), form, dtype).to(DEVICE)
        expected = train(twin, 3, (0, 1), dtype)
        for options in kinds:
            model = wrap(build(), mesh=mesh, gather_as=form, mp_policy=policy, **options)
            losses = train(model, 3, (rank, world_size), dtype)
            torch.testing.assert_close(losses, expected, rtol=tolerance[0], atol=tolerance[1])


def check_weights_arrive_bit_for_bit(rank, world_size):
    """What a module computes with is ``round`` of the whole parameter, on any number of ranks."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    for form in FORMS:
        original = build().to(DEVICE)
        model = wrap(copy.deepcopy(original), mesh=mesh, gather_as=form)
        for unit in model:
            unit.unshard()
        for name, param in original.named_parameters():
            found = model.get_parameter(name)
            assert torch.equal(found.detach(), form.round(param)), name
        for unit in model:
            unit.reshard()
        for (name, whole), param in zip(
            iter_full_parameters(model), original.parameters(), strict=True
        ):
            assert torch.equal(whole, param), name  # the sharded ones are exact


def check_bytes(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    plain, scaled = nn.Linear(512, 768, bias=False), nn.Linear(512, 768, bias=False)
    fully_shard(plain, mesh=mesh)
    fully_shard(scaled, mesh=mesh, gather_as=BlockScaled())
    sent = []
    for module in (plain, scaled):
        module.set_collectives("torch")
        with torch.no_grad(), CountCollectives() as mode:
            module(torch.ones(1, 512, device=DEVICE))
        sent.append(mode.nbytes)
    assert sent[1] <= sent[0] / 4 * (1 + 4 / 32**2) + 64, sent


def check_composition(rank, world_size):
    """Replicas, copies kept over neighbours, accumulation, clipping, copies, casts and freezing."""
    form = BlockScaled()
    expected = train(one_process(build(), form, torch.float32).to(DEVICE), 3, (0, 1))
    kinds = [{"reshard_after_forward": False}]
    if world_size == 4:
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
        kinds += [{"mesh": mesh}, {"reshard_after_forward": 2}]
    for options in kinds:
        model = wrap(build(), gather_as=form, **options)
        losses = train(model, 3, (rank, world_size))
        torch.testing.assert_close(losses, expected, rtol=2e-5, atol=1e-6)
    model = wrap(build(), gather_as=form)
    model[0].up.weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        for _ in range(2):
            F.mse_loss(each(inputs(rank)), torch.zeros(12, 7, device=DEVICE)).backward()
        clip_grad_norm_(each.parameters(), 1.0)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) == (name == "0.up.weight")
        if a.grad is not None:
            assert torch.equal(a.grad.to_local(), b.grad.to_local())
    model.to(torch.bfloat16)
    model(inputs(0).bfloat16()).sum().backward()


def check_other_parameters(rank, world_size):
    """Units without anything to scale, empty parameters, and integers beside."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(5, device=DEVICE))
    model.codes = nn.Parameter(torch.arange(9000, device=DEVICE), requires_grad=False)
    model.empty = nn.Parameter(torch.ones(0, 64, device=DEVICE))
    model.weight = nn.Parameter(torch.randn(64, 80, dtype=torch.float64, device=DEVICE))
    model.forward = lambda: (model.weight.sum() + model.scale.sum() + model.empty.sum()).double()
    weight = model.weight.detach().clone()
    fully_shard(model, gather_as=BlockScaled())
    model.unshard()
    assert torch.equal(model.codes.detach(), torch.arange(9000, device=DEVICE))
    assert torch.equal(model.weight.detach(), BlockScaled().round(weight))
    model.reshard()
    model().backward()
    assert model.scale.grad is not None


def check_mistakes(rank, world_size):
    matrix = nn.Linear(512, 512)
    for error, match, options in (
        (TypeError, "gather_as=8 is a int", {"gather_as": 8}),
        (ValueError, r"weight: Rows\(n=1\) cuts tiles", {"granularity": Rows(1)}),
        (ValueError, r"weight: Rows\(n=48\) cuts tiles", {"granularity": Rows(48)}),
        (ValueError, "weight: Elements.* cuts tiles", {"granularity": Elements()}),
    ):
        with pytest.raises(error, match=match):
            fully_shard(matrix, **{"gather_as": BlockScaled(), **options})
    if world_size > 1:
        other = BlockScaled(block=16 if rank else 32)
        with pytest.raises(RuntimeError, match="BlockScaled"):
            fully_shard(matrix, gather_as=other)
    fully_shard(matrix, gather_as=BlockScaled(), granularity=Rows(64))
    assert all(type(g.weights).__name__ == "ScaledBuffer" for g in param_groups(matrix))


def check_all(rank, world_size):
    check_weights_arrive_bit_for_bit(rank, world_size)
    check_bytes(rank, world_size)
    check_composition(rank, world_size)
    check_other_parameters(rank, world_size)
    check_mistakes(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_travel_as_codes(run_ranks, world_size):
    run_ranks(check_all, world_size)


@pytest.mark.parametrize("form", FORMS[:2], ids=["int8", "float8"])
def test_training_is_that_of_one_process(run_ranks, form):
    run_ranks(check_equal_to_one_process, 2, form)
    run_ranks(check_equal_to_one_process, 3, form)
