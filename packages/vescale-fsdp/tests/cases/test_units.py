# SPDX-License-Identifier: Apache-2.0
"""Reports on what a unit may hold and how it may be called, beside an unsharded twin."""

import copy
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from testing.models import batch, build, loss_of, reference_step
from testing.ranks import DEVICE
from vescale.dtensor import DTensor
from vescale.fsdp import MixedPrecisionPolicy, fully_shard, inspect, no_sync
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.param_group import State
from vescale.fsdp.units import param_groups

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Calls:
    """Count gathers and reductions, whatever sends them."""

    def __enter__(self):
        self.gathers = self.reductions = 0
        gather, reduce = DBuffer.all_gather, DBuffer.reduce_scatter

        def counted_gather(buffer, **options):
            self.gathers += 1
            return gather(buffer, **options)

        def counted_reduce(buffer, *options):
            self.reductions += 1
            return reduce(buffer, *options)

        self._patches = [
            mock.patch.object(DBuffer, "all_gather", counted_gather),
            mock.patch.object(DBuffer, "reduce_scatter", counted_reduce),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()


def inputs(rank, width, step=0, rows=4):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(rows, width, generator=generator).to(DEVICE)


def assert_gradients(model, twin, what="", **tolerance):
    grads = {name: param.grad for name, param in model.named_parameters()}
    for name, param in twin.named_parameters():
        got = grads[name]
        assert (got is None) == (param.grad is None), f"{what} {name}"
        if got is not None:
            torch.testing.assert_close(
                got.full_tensor() if isinstance(got, DTensor) else got,
                param.grad,
                **(tolerance or CLOSE),
                msg=lambda m, n=name: f"{what} {n} {m}",
            )


def train(model, twin, call, rank, world_size, steps=2, what="", **tolerance):
    """Step the wrapped model on this rank's inputs, and its twin on those of all ranks."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for step in range(steps):
        call(model, rank, step).backward()
        for index in range(world_size):
            (call(twin, index, step) / world_size).backward()
        assert_gradients(model, twin, what, **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# --- tied parameters: rows 16, 17, 19 -----------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.mid = nn.Embedding(11, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(self.mid(self.emb(tokens)).tanh())


def tied_loss(model, index, step):
    tokens = batch(step, index, DEVICE) % 11
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def check_tied(rank, world_size):
    for wraps in (("emb", "head"), (), ("emb", "mid", "head"), ("head",)):
        torch.manual_seed(2)
        twin = Tied().to(DEVICE)
        model = copy.deepcopy(twin)
        for name in wraps:
            fully_shard(model.get_submodule(name))
        fully_shard(model)
        assert model.emb.weight is model.head.weight
        train(model, twin, tied_loss, rank, world_size, what=f"tied {wraps}")
        model.to(torch.float64).to(torch.float32)
        model.load_state_dict(copy.deepcopy(twin.state_dict()))
        assert model.emb.weight is model.head.weight
        train(model, twin, tied_loss, rank, world_size, what=f"tied {wraps}, loaded")
    # A policy that wraps every layer of some kind, whatever it finds (row 19).
    twin = build(tied=True).to(DEVICE)
    model = copy.deepcopy(twin)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear | nn.Embedding):
            fully_shard(module)
    fully_shard(model)
    assert model.head.weight is model.embed.weight
    loss_of(model, batch(0, rank, DEVICE)).backward()
    reference_step(twin, 0, world_size, DEVICE)
    assert_gradients(model, twin, "auto-wrapped")


# --- branches: row 20 ---------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(5, 7)

    def forward(self, x, with_b):
        y = self.a(x)
        return y + self.b(x) if with_b else y


def check_branches(rank, world_size):
    torch.manual_seed(0)
    base = Branches().to(DEVICE)
    ours = fully_shard(copy.deepcopy(base))
    theirs = DistributedDataParallel(copy.deepcopy(base), find_unused_parameters=True)
    for model in (ours, theirs):
        model(inputs(rank, 5), rank != 0).square().mean().backward()
    assert_gradients(ours, theirs.module, "branches")
    assert ours.c.weight.grad is None


# --- forwards: rows 26, 31, 32, 38, 41, 104 -----------------------------------------------------


class HeadTwice(nn.Module):
    """The second result of the head is on the module only."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5)
        self.kept = None

    def forward(self, x):
        h = self.norm(self.body(x))
        out = self.head(h)
        self.kept = self.head(2 * h.tanh())
        return out


def check_head_twice(rank, world_size):
    def call(model, index, step):
        out = model(inputs(index, 6, step))
        return out.square().mean() + model.kept.square().sum()

    for parts in (("norm", "head"), (("norm", "head"),), ("body", ("norm", "head"))):
        torch.manual_seed(0)
        twin = HeadTwice().to(DEVICE)
        model = copy.deepcopy(twin)
        for part in parts:
            grouped = isinstance(part, tuple)
            unit = [model.get_submodule(name) for name in part] if grouped else None
            fully_shard(unit or model.get_submodule(part), reshard_after_forward=True)
        fully_shard(model, reshard_after_forward=True)
        train(model, twin, call, rank, world_size, what=f"head twice {parts}")


def check_micro_batches(rank, world_size):
    """Forwards and backwards of micro-batches as a pipeline's schedule mixes them (row 31)."""
    twin = build().to(DEVICE)
    model = copy.deepcopy(twin)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        for m, ranks in ((model, [rank]), (twin, range(world_size))):
            for index in ranks:
                losses = [loss_of(m, batch(i, index, DEVICE)) / len(ranks) for i in (0, 1)]
                if m is model:
                    m.set_requires_gradient_sync(False)
                    m.set_is_last_backward(False)
                losses[0].backward()
                losses.append(loss_of(m, batch(2, index, DEVICE)) / len(ranks))
                losses[1].backward()
                if m is model:
                    m.set_requires_gradient_sync(True)
                    m.set_is_last_backward(True)
                losses[2].backward()
        assert all(group.state is State.SHARDED for group in param_groups(model))
        assert_gradients(model, twin, "micro-batches")
        model.zero_grad()
        twin.zero_grad()


class Generator(nn.Module):
    """``generate`` calls the parts without the module's own forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(29, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 29)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)

    def generate(self, token, count):
        tokens = [token]
        for _ in range(count):
            x = self.embed(tokens[-1])
            for layer in self.layers:
                x = x + layer(x).tanh()
            tokens.append(self.head(x).argmax(-1))
        return tokens


def check_generate(rank, world_size):
    torch.manual_seed(0)
    twin = Generator().to(DEVICE)
    model = copy.deepcopy(twin)
    for part in (model.embed, *model.layers, model.head, model):
        fully_shard(part)
    start = torch.tensor([rank], device=DEVICE)

    def loss(m, index, step):
        tokens = batch(step, index, DEVICE)
        return F.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten())

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(
                torch.cat(model.generate(start, 5)), torch.cat(twin.generate(start, 5))
            )
        train(model, twin, loss, rank, world_size, steps=1, what="after generate")
    # Weights stay between tokens on request: no communication, so ranks may stop when they like.
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model.generate(start, 1)
        with Calls() as calls:
            tokens = model.generate(start, 2 + 3 * rank)
        assert calls.gathers == 0
        assert torch.equal(torch.cat(tokens), torch.cat(twin.generate(start, 2 + 3 * rank)))
    model.reshard(recurse=True)  # else the optimizer would be one of gathered parameters
    train(model, twin, loss, rank, world_size, steps=1, what="after kept weights")


class UnusedInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, unused):
        return self.linear(x)


class AroundFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(6, 6), UnusedInput(), nn.Linear(6, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.frozen(x.tanh(), x.sin()))


class Adapted(nn.Module):
    """A frozen layer with a small trainable one beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.adapter = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return x + self.base(x).tanh() + self.adapter(x)


def check_frozen(rank, world_size):
    def call(model, index, step):
        return model(inputs(index, 6, step).requires_grad_(step == 1)).square().mean()

    torch.manual_seed(0)
    twin = AroundFrozen().to(DEVICE)  # row 41
    model = copy.deepcopy(twin)
    for part in (model.first, model.frozen, model.last, model):
        fully_shard(part, reshard_after_forward=True)
    train(model, twin, call, rank, world_size, what="frozen with an unused input")
    # Row 40: never more than two units' full weights, frozen or not.
    twin = nn.Sequential(*(Adapted() for _ in range(8))).to(DEVICE)
    model = copy.deepcopy(twin)
    live = []
    for block in model:
        fully_shard(block)
        block.register_full_backward_hook(
            lambda *_: live.append(
                sum(any(g.weights.has_full for g in param_groups(b)) for b in model)
            )
        )
    fully_shard(model)
    train(model, twin, call, rank, world_size, what="adapters")
    assert len(live) == 2 * len(model)
    assert max(live) <= 2, live


def check_root(rank, world_size):
    """Full weights of the root between forward and backward, and what shows them (row 104)."""
    model = build().to(DEVICE)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    sharded = {name: p.shape for name, p in model.named_parameters()}
    report = str(inspect.layout(model))
    loss = loss_of(model, batch(0, rank, DEVICE))
    assert not isinstance(model.head.weight, DTensor)
    assert {name: p.shape for name, p in model.named_parameters()} == sharded
    assert str(inspect.layout(model)) == report
    assert isinstance(model.state_dict()["head.weight"], DTensor)
    loss.backward()
    model.set_reshard_after_forward(True, recurse=False)
    loss_of(model, batch(0, rank, DEVICE))
    assert isinstance(model.head.weight, DTensor)
    model.unshard()
    assert not isinstance(model.head.weight, DTensor)
    model.reshard()
    assert isinstance(model.head.weight, DTensor)


# --- kinds of parameters: rows 46, L1, L8 -------------------------------------------------------


class Kinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5).t())  # not contiguous
        self.nothing = nn.Parameter(torch.empty(0, 4))
        for dtype in (torch.uint8, torch.int64, torch.bool):
            values = (torch.arange(15).view(5, 3) % 2).to(dtype)
            self.register_parameter(
                str(dtype).rpartition(".")[2], nn.Parameter(values, requires_grad=False)
            )

    def forward(self, x):
        codes = self.uint8[:, 0].float() + self.int64[:, 1] + self.bool[:, 2]
        return (x + codes) @ self.weight.t().t() + self.nothing.sum()


def check_kinds(rank, world_size):
    torch.manual_seed(0)
    twin = Kinds().to(DEVICE)
    model = fully_shard(copy.deepcopy(twin))
    train(
        model,
        twin,
        lambda m, i, s: m(inputs(i, 5, s)).square().mean(),
        rank,
        world_size,
        what="kinds",
    )
    for name, param in twin.named_parameters():
        if not param.is_floating_point():
            assert model.get_parameter(name).dtype == param.dtype
            assert torch.equal(model.get_parameter(name).full_tensor(), param), name


class Nothing(nn.Module):
    """In units and dtypes of their own, used or not: parameters without elements (row L1)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.used = nn.Parameter(torch.empty(0, 5))
        self.unused = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))

    def forward(self, x):
        return self.linear(x).square().mean() + (x @ self.used.t()).sum()


class NothingAtAll(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = (nn.Parameter(torch.empty(0, 5)) for _ in range(2))

    def forward(self, x):
        return x.sum() + (x @ self.used.t()).sum()


def check_nothing(rank, world_size):
    for module in (Nothing(), NothingAtAll()):
        model = fully_shard(module.to(DEVICE))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(inputs(rank, 5).requires_grad_()).backward()
            assert model.used.grad.shape == (0, 5)
            optimizer.step()
            optimizer.zero_grad()


# --- accumulation: rows 47, 52 ------------------------------------------------------------------


def check_no_sync(rank, world_size):
    twin = build(layers=1).to(DEVICE)
    models = [copy.deepcopy(twin), copy.deepcopy(twin)]
    for model in models:
        fully_shard(model.layers[0])
        fully_shard(model)
    # Two models in one step, of which one accumulates.
    with Calls() as calls, no_sync(models[0]):
        for step in range(4):
            loss_of(models[0], batch(step, rank, DEVICE)).backward()
    assert not calls.reductions
    with Calls() as calls:
        loss_of(models[0], batch(4, rank, DEVICE)).backward()
        loss_of(models[1], batch(0, rank, DEVICE)).backward()
    assert calls.reductions == 4
    for step in range(5):
        reference_step(twin, step, world_size, DEVICE)
    assert_gradients(models[0], twin, "no_sync")
    # In bfloat16 the unsharded sum is kept in the dtype of the reduction.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(8, 8, bias=False).to(DEVICE), mp_policy=policy)
    each = torch.full((1, 8), 1e-3, device=DEVICE)
    with no_sync(model):
        for _ in range(63):
            model(each).float().sum().backward()
    model(each).float().sum().backward()
    expected = torch.full((8, 8), 64 * each[0, 0].bfloat16().item(), device=DEVICE)
    torch.testing.assert_close(model.weight.grad.full_tensor(), expected, rtol=1e-4, atol=0)


# --- what stock FSDP2 does right ----------------------------------------------------------------


@dataclass
class Output:
    logits: torch.Tensor
    extra: dict


class GivesDataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.a(x).tanh()
        return Output(self.b(h), {"hidden": [h]})


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(3))

    def forward(self, x):
        out = self.inner(x)
        return out.logits * self.scale, out.extra["hidden"][0]


def check_outputs(rank, world_size):
    def call(model, index, step):
        logits, hidden = model(inputs(index, 6, step))
        return logits.square().mean() + hidden.square().mean()

    torch.manual_seed(0)
    twin = Around(GivesDataclass()).to(DEVICE)
    model = copy.deepcopy(twin)
    fully_shard(model.inner, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    train(model, twin, call, rank, world_size, what="dataclass")


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = weight_norm(nn.Linear(6, 9)), weight_norm(nn.Linear(9, 2))

    def forward(self, x):
        return self.b(self.a(x).tanh())


def check_parametrisation(rank, world_size):
    torch.manual_seed(0)
    twin = Normed().to(DEVICE)
    model = copy.deepcopy(twin)
    for part in (model.a, model.b, model):
        fully_shard(part)
    train(
        model,
        twin,
        lambda m, i, s: m(inputs(i, 6, s)).square().mean(),
        rank,
        world_size,
        what="weight_norm",
    )


def check_nested_recompute(rank, world_size):
    """Two forwards, then one backward, nested units and checkpoints (row 25)."""
    torch.manual_seed(0)
    twin = nn.Sequential(Adapted(), nn.Sequential(Adapted(), Adapted())).to(DEVICE)
    model = copy.deepcopy(twin)
    for part in (model[1][0], model[1], model[0], model):
        fully_shard(part, reshard_after_forward=True)

    def call(m, index, step):
        x = inputs(index, 6, step).requires_grad_()

        def run(x):
            return m[1](checkpoint(m[0], x, use_reentrant=False))

        a, b = (checkpoint(run, y, use_reentrant=False) for y in (x, 2 * x))
        return (a + b).square().mean()

    model(inputs(rank, 6))
    train(model, twin, call, rank, world_size, what="nested recompute")


def check_first(rank, world_size):
    check_tied(rank, world_size)
    check_branches(rank, world_size)
    check_head_twice(rank, world_size)
    check_micro_batches(rank, world_size)
    check_generate(rank, world_size)


def check_second(rank, world_size):
    check_frozen(rank, world_size)
    check_root(rank, world_size)
    check_kinds(rank, world_size)
    check_nothing(rank, world_size)
    check_no_sync(rank, world_size)
    check_outputs(rank, world_size)
    check_parametrisation(rank, world_size)
    check_nested_recompute(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ties_branches_forwards_and_generation(run_ranks, world_size):
    run_ranks(check_first, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_frozen_units_kinds_accumulation_and_outputs(run_ranks, world_size):
    run_ranks(check_second, world_size)
