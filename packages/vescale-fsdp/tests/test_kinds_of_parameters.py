# SPDX-License-Identifier: Apache-2.0
"""Parameters that are not plain floats: subclasses, integers, quantised bases under adapters."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from testing.ranks import DEVICE
from vescale.fsdp import (
    CPUOffloadPolicy,
    Elements,
    MixedPrecisionPolicy,
    Rows,
    clip_grad_norm_,
    fully_shard,
)
from vescale.fsdp.units import param_groups


class Scaled(nn.Parameter):
    """A parameter subclass whose kernel needs an attribute, as those of quantised weights do."""

    def __new__(cls, data, scale, requires_grad=True):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.scale = scale
        return self


class Loud(nn.Parameter):
    """A parameter subclass that takes part in every operator."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class ScaledLinear(nn.Module):
    def __init__(self, *, trainable):
        super().__init__()
        self.weight = Scaled(torch.randn(5, 7), 0.25, trainable)
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        assert type(self.weight) is Scaled
        return F.linear(x, self.weight * self.weight.scale, self.bias)


def check_subclasses(rank, world_size):
    """Class and attributes of a subclass of nn.Parameter are there in forward and backward."""
    for trainable in (True, False):
        torch.manual_seed(0)
        plain = ScaledLinear(trainable=trainable).to(DEVICE)
        model = ScaledLinear(trainable=trainable).to(DEVICE)
        model.load_state_dict(plain.state_dict())
        fully_shard(model)
        assert model.weight.scale == 0.25
        for m in (model, copy.deepcopy(model)):
            x = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)).to(DEVICE)
            m(x).square().sum().backward()
            plain.zero_grad()
            plain(x).square().sum().backward()
            for name, param in plain.named_parameters():
                grad = m.get_parameter(name).grad
                assert (grad is None) == (param.grad is None)
                if grad is not None:
                    torch.testing.assert_close(grad.full_tensor(), param.grad.data)
    model = nn.Linear(3, 3)
    model.weight = Loud(torch.randn(3, 3))
    with pytest.raises(NotImplementedError, match=r"weight is a Loud.*__torch_function__"):
        fully_shard(model)


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        for name, dtype in (
            ("small", torch.uint8),
            ("large", torch.int64),
            ("mask", torch.bool),
            ("signed", torch.int8),
        ):
            values = torch.arange(21).reshape(7, 3) % 2
            setattr(self, name, nn.Parameter(values.to(dtype), requires_grad=False))
        self.weight = nn.Parameter(torch.ones(7, 3))

    def forward(self, x):
        codes = self.small.float() + self.large - self.signed
        return torch.where(self.mask, x @ (self.weight * codes).T @ codes, 0).sum()


def check_frozen_integers(rank, world_size):
    """Frozen parameters of any dtype are gathered bit for bit, beside trainable ones."""
    plain = Codes().to(DEVICE)
    for options in ({}, {"granularity": Elements()}, {"offload_policy": CPUOffloadPolicy()}):
        model = fully_shard(Codes().to(DEVICE), **options)
        x = torch.randn(7, 3, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        for m in (plain, model):
            m.zero_grad()
            m(x).backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)
        for name, param in plain.named_parameters():
            got = model.get_parameter(name).full_tensor()
            assert got.dtype == param.dtype
            assert torch.equal(got.to(DEVICE), param.detach())
        model.load_state_dict(plain.state_dict())


class QuantisedLinear(nn.Module):
    """Frozen int8 codes with a scale per row, and a trainable adapter of low rank, in one unit."""

    def __init__(self, width=12, rank=2):
        super().__init__()
        weight = torch.randn(width, width)
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.codes = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.packed = nn.Parameter(torch.randint(0, 255, (width,)).byte(), requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, width) / width)
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x):
        base = self.codes.to(x.dtype) * self.scale.to(x.dtype)
        shift = (self.packed >> 4).to(x.dtype) - 8
        return x + torch.tanh(F.linear(x, base) + F.linear(F.linear(x, self.down), self.up) + shift)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def fused(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def momentum(params):
    return torch.optim.SGD(params, lr=1e-1, momentum=0.9)


def train(model, make_optimizer, clip):
    """Train with all parameters in the optimizer, as scripts do; return losses and norms."""
    optimizer = make_optimizer(model.parameters())
    generator, seen = torch.Generator().manual_seed(0), []
    for _ in range(3):
        x = torch.randn(4, 12, generator=generator).to(DEVICE)
        loss = model(x).float().square().mean()
        loss.backward()
        norm = clip(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        seen.append((loss.item(), norm.item()))
    return seen


# torch 2.11 makes every sharded parameter one that requires a gradient, and fails with integers.
STOCK_TAKES_INTEGERS = torch.__version__ >= "2.12"


def check_quantised_base(rank, world_size):
    """Adapters over a quantised base train as on one process and as with FSDP2."""
    torch.manual_seed(0)
    start = nn.Sequential(QuantisedLinear(), QuantisedLinear()).to(DEVICE)
    stock_clip = nn.utils.clip_grad_norm_
    mesh = init_device_mesh(DEVICE, (world_size,))
    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)  # FSDP2 has had two defaults
    for make_optimizer, clip, options in (
        (adamw, clip_grad_norm_, {}),
        (momentum, stock_clip, {"granularity": Rows(4)}),
        (fused, clip_grad_norm_, {"offload_policy": CPUOffloadPolicy()}),
        (adamw, stock_clip, {"mp_policy": half}),
    ):
        trained = []
        for shard in (fully_shard, fsdp2_fully_shard, None):
            if shard is fsdp2_fully_shard and not STOCK_TAKES_INTEGERS:
                trained.append(trained[0])
                continue
            model = copy.deepcopy(start)
            if shard is not None:
                own = options if shard is fully_shard else {}
                own = own | {k: v for k, v in options.items() if k == "mp_policy"}
                for part in (*model, model):
                    shard(part, mesh=mesh, **own)
            used = stock_clip if shard is not fully_shard else clip
            trained.append((model, train(model, make_optimizer, used)))
        (ours, seen), (stock, seen_stock), (_, seen_plain) = trained
        torch.testing.assert_close(seen, seen_stock, rtol=1e-5, atol=1e-6)
        if "mp_policy" not in options:
            torch.testing.assert_close(seen, seen_plain, rtol=1e-5, atol=1e-6)
        assert len(param_groups(ours)) == 4 * 2  # int8, uint8, frozen and trainable floats
        for name, param in ours.named_parameters():
            value = param.full_tensor().to(DEVICE)
            expected = stock.get_parameter(name).full_tensor()
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=name)
            frozen = not param.requires_grad
            assert not frozen or torch.equal(value, start.get_parameter(name))
            assert not frozen or param.grad is None


def check_all(rank, world_size):
    check_subclasses(rank, world_size)
    check_frozen_integers(rank, world_size)
    check_quantised_base(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_subclasses_integers_and_quantised_bases(run_ranks, world_size):
    run_ranks(check_all, world_size)
