# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of every kind, around units and inside, beside an unsharded twin."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from testing.ranks import DEVICE
from vescale.fsdp import MixedPrecisionPolicy, Rows, fully_shard
from vescale.fsdp.param_group import State
from vescale.fsdp.units import param_groups

WIDTH = 11
saved_operators = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def prefer(context, operator, *args, **kwargs):
    """Save products, recompute the rest; also a policy may be a function."""
    if operator in saved_operators:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(what):
    return functools.partial(create_selective_checkpoint_contexts, what)


def around(**options):
    """Return a call of a block through ``checkpoint``."""
    return lambda block, x: checkpoint(block, x, **options)


class Layer(nn.Module):
    """Attention-like: two parts, of which ``inner`` may be recomputed, and dropout."""

    def __init__(self, inner=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 23), nn.Linear(23, WIDTH)
        self.inner = inner

    def mlp(self, x):
        return self.down(F.dropout(F.silu(self.up(x)), 0.2, self.training))

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        if self.inner is None:
            return x + self.mlp(x)
        return x + checkpoint(self.mlp, x, **self.inner)


class Model(nn.Module):
    def __init__(self, call=None, inner=None, layers=2):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(inner) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)
        self.call = call

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if self.call is None else self.call(layer, x)
        return self.head(x)


class Sequence(Model):
    """Two segments of units."""

    def forward(self, x):
        x = checkpoint_sequential(self.layers, 2, self.first(x), use_reentrant=False)
        return self.head(x)


CALLS = {
    "reentrant": {"call": around(use_reentrant=True)},
    "non-reentrant": {"call": around(use_reentrant=False)},
    "without random state": {"call": around(use_reentrant=False, preserve_rng_state=False)},
    "selective list": {"call": around(use_reentrant=False, context_fn=selective(saved_operators))},
    "selective function": {"call": around(use_reentrant=False, context_fn=selective(prefer))},
    "inside": {"inner": {"use_reentrant": False}},
    "inside reentrant": {"inner": {"use_reentrant": True}},
    "inside selective": {
        "inner": {"use_reentrant": False, "context_fn": selective(saved_operators)}
    },
    "inside and around": {
        "call": around(use_reentrant=False),
        "inner": {"use_reentrant": False},
    },
    "selective around and inside": {
        "call": around(use_reentrant=False, context_fn=selective(prefer)),
        "inner": {"use_reentrant": False},
    },
    "inside and reentrant around": {
        "call": around(use_reentrant=True),
        "inner": {"use_reentrant": False},
    },
}


def blocks_first(model, wrap):
    """``fully_shard`` of what ``wrap`` makes of a layer."""
    for index in range(len(model.layers)):
        model.layers[index] = wrap(model.layers[index])


def non_reentrant(layer):
    return checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)


def reentrant(layer):
    return checkpoint_wrapper(layer, CheckpointImpl.REENTRANT)


def selective_wrapper(layer):
    return checkpoint_wrapper(layer, context_fn=selective(prefer))


WRAPPERS = {
    "wrapper": non_reentrant,
    "reentrant wrapper": reentrant,
    "selective wrapper": selective_wrapper,
    "offload wrapper": offload_wrapper,
}


def shard(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def inputs(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, WIDTH, generator=generator).to(DEVICE)


def clean(name):
    return name.replace("_checkpoint_wrapped_module.", "")


def assert_gradients(model, twin, what):
    """This rank's part of each gradient is that of the twin's: no communication."""
    theirs = {clean(name): param.grad for name, param in twin.named_parameters()}
    names = {id(param): clean(name) for name, param in model.named_parameters()}
    seen = []
    for group in param_groups(model):
        for index, item in enumerate(group.managed):
            begin, _, numel = group.plan.local_range(index, group.weights.rank)
            name = names[id(item.sharded)]
            seen.append(name)
            torch.testing.assert_close(
                item.sharded.grad.to_local(),
                theirs[name].flatten()[begin : begin + numel],
                rtol=1e-4,
                atol=1e-6,
                msg=lambda m, n=name: f"{what}: {n} {m}",
            )
    assert sorted(seen) == sorted(theirs)


def compare(make, rank, world_size, what, *, after=None, twice=False, **options):
    """Two steps of a wrapped model and of its twin, which both recompute."""
    torch.manual_seed(1)
    twin = make().to(DEVICE)
    model = make().to(DEVICE)
    model.load_state_dict(twin.state_dict())
    shard(model, **options)
    if after is not None:
        after(model)
        after(twin)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]

    def loss(m, index, step):
        torch.manual_seed(1000 * step + index)  # of dropout
        x = inputs(index, step).requires_grad_(step == 0)
        y = m(x).square().mean()
        return y + m(2 * x).square().mean() if twice else y

    for step in range(2):
        mine = loss(model, rank, step)
        mine.backward()
        for index in range(world_size):
            other = loss(twin, index, step)
            if index == rank:
                torch.testing.assert_close(mine, other, msg=what)
            (other / world_size).backward()
        assert all(group.state is State.SHARDED for group in param_groups(model)), what
        assert_gradients(model, twin, what)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check_calls(rank, world_size):
    for what, how in CALLS.items():
        make = functools.partial(Model, **how)
        compare(make, rank, world_size, what, reshard_after_forward=True, granularity=Rows(3))
        if "reentrant" not in what.split():
            compare(make, rank, world_size, f"{what}, twice", twice=True)
    with set_checkpoint_early_stop(False):
        make = functools.partial(Model, **CALLS["inside and around"])
        compare(make, rank, world_size, "no early stop")
    compare(Sequence, rank, world_size, "sequence", reshard_after_forward=True)
    make = functools.partial(Model, **CALLS["non-reentrant"])
    compare(make, rank, world_size, "kept", reshard_after_forward=False)


def check_wrappers(rank, world_size):
    for what, wrap in WRAPPERS.items():
        for twice in (False, True):
            if twice and wrap is reentrant:
                continue

            def inside(wrap=wrap):
                model = Model()
                blocks_first(model, wrap)
                return model

            compare(inside, rank, world_size, f"{what} in a unit", twice=twice)
            compare(
                Model,
                rank,
                world_size,
                f"{what} around a unit",
                after=lambda m, wrap=wrap: blocks_first(m, wrap),
                twice=twice,
            )

    def apply(model):
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=checkpoint_wrapper,
            check_fn=lambda module: isinstance(module, Layer),
        )

    compare(Model, rank, world_size, "applied to a wrapped model", after=apply)


def check_half_precision(rank, world_size):
    """Recomputed in the dtypes of the forward: the loss goes down as without recomputation."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen = {}
    for what, how in {"plain": {}, **CALLS}.items():
        torch.manual_seed(1)
        model = shard(Model(**how).to(DEVICE), mp_policy=policy).eval()
        model(inputs(rank, 0)).float().square().mean().backward()
        seen[what] = {n: p.grad.to_local() for n, p in model.named_parameters()}
    for what, grads in seen.items():
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad, seen["plain"][name], rtol=0, atol=0, msg=f"{what}: {name}"
            )


class Broken(Exception):
    pass


def check_exception_while_recomputing(rank, world_size):
    """It reaches the caller, and the next step is right (row 97)."""
    torch.manual_seed(1)
    models = [shard(Model(call=around(use_reentrant=False)).to(DEVICE)).eval() for _ in range(2)]
    models[0].load_state_dict(models[1].state_dict())
    calls = []

    def fail_second(*_):
        calls.append(1)
        if len(calls) == 2:
            raise Broken

    handle = models[0].layers[1].down.register_forward_pre_hook(fail_second)
    with pytest.raises(Broken):
        models[0](inputs(rank, 0)).square().mean().backward()
    handle.remove()
    models[0].reset_iter_state()
    models[0].zero_grad()
    for model in models:
        model(inputs(rank, 1)).square().mean().backward()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())


def check_hybrid(rank, world_size):
    """With replicas, and with a copy kept on fewer ranks."""
    mesh = init_device_mesh(DEVICE, (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    for what in ("non-reentrant", "selective list", "inside and around"):
        make = functools.partial(Model, **CALLS[what])
        compare(make, rank, world_size, f"{what}, hybrid", mesh=mesh, twice=True)
        compare(make, rank, world_size, f"{what}, 2 of 4", reshard_after_forward=2, twice=True)


def check_others(rank, world_size):
    check_wrappers(rank, world_size)
    check_half_precision(rank, world_size)
    check_exception_while_recomputing(rank, world_size)


def test_recomputing_changes_no_gradient(run_ranks):
    run_ranks(check_calls, 3)


def test_wrappers_precision_and_exceptions(run_ranks):
    run_ranks(check_others, 2)


def test_recomputing_on_hybrid_meshes(run_ranks):
    run_ranks(check_hybrid, 4, exact=True)
