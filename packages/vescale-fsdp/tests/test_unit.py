# SPDX-License-Identifier: Apache-2.0
"""Forwards and backwards in any order, held against an unsharded twin."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from testing.models import VOCAB, batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import fully_shard
from vescale.fsdp.units import param_groups


class Hidden:
    """An output that nobody can look into."""

    def __init__(self, value):
        self.value = value


class Inner(nn.Module):
    def __init__(self, wrap_output=False):
        super().__init__()
        self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 6)
        self.wrap_output, self.side = wrap_output, None

    def forward(self, x):
        h = self.a(x).tanh()
        self.side = h
        y = self.b(h)
        return Hidden(y) if self.wrap_output else y


class Outer(nn.Module):
    """Two units in a root. ``how`` names what is done between them."""

    def __init__(self, how="plain"):
        super().__init__()
        self.how = how
        self.first, self.second = Inner(), Inner(wrap_output=how == "object")
        self.head = nn.Linear(6, 2)
        if how == "reentrant shared":
            self.shared = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x):
        if self.how == "twice":
            return self.head(self.second(self.first(self.first(x))))
        if self.how == "in place":
            x = self.first(x)
            x += 1
            return self.head(self.second(x))
        if self.how in ("reentrant", "non-reentrant"):
            reentrant = self.how == "reentrant"
            x = checkpoint(self.first, x, use_reentrant=reentrant)
            return self.head(checkpoint(self.second, x, use_reentrant=reentrant))
        if self.how == "reentrant shared":
            for _ in range(2):  # a unit, and a layer of the root's, used twice
                x = checkpoint(self.first, x, use_reentrant=True)
                x = checkpoint(self.shared, x, use_reentrant=True)
            return self.head(self.second(x))
        if self.how == "segment":
            return self.head(
                checkpoint(lambda x: self.second(self.first(x)), x, use_reentrant=False)
            )
        if self.how == "object":
            return self.head(self.second(self.first(x)).value)
        if self.how == "dict":
            return {"y": [self.head(self.second(self.first(x)))]}
        if self.how == "side":
            self.second(self.first(x))
            return self.first.side.sum(-1, keepdim=True) + self.second.side.sum(-1, keepdim=True)
        return self.head(self.second(self.first(x)))


def pair(how="plain", **options):
    """Return a wrapped model and its plain twin."""
    torch.manual_seed(3)
    plain = Outer(how).to(DEVICE)
    wrapped = Outer(how).to(DEVICE)
    wrapped.load_state_dict(plain.state_dict())
    for unit in (wrapped.first, wrapped.second):
        fully_shard(unit, **options)
    return fully_shard(wrapped, **options), plain


def inputs(rank, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randn(5, 6, generator=generator).to(DEVICE)
    return x.requires_grad_(requires_grad)


def value(output):
    return (output["y"][0] if isinstance(output, dict) else output).square().sum()


def compare(wrapped, plain, note):
    """The twin's gradients, averaged over ranks, are the wrapped model's."""
    for name, param in plain.named_parameters():
        mine = wrapped.get_parameter(name).grad
        if param.grad is None:
            assert mine is None, f"{note}: {name} has a gradient"
            continue
        expected = param.grad.clone()
        dist.all_reduce(expected)
        expected /= dist.get_world_size()
        torch.testing.assert_close(
            mine.full_tensor(),
            expected,
            rtol=1e-5,
            atol=1e-6,
            msg=lambda m, n=name: f"{note}: {n} {m}",
        )
    for group in param_groups(wrapped):
        assert not group.weights.has_full or not group.plan.shard_numel, f"{note}: still gathered"


def run(sequence, how="plain", **options):
    wrapped, plain = pair(how, **options)
    for model in (wrapped, plain):
        sequence(model)
    compare(wrapped, plain, f"{sequence.__name__} {how} {options}")
    # The next ordinary step is right as well.
    for model in (wrapped, plain):
        model.zero_grad()
        value(model(inputs(dist.get_rank(), 9))).backward()
    compare(wrapped, plain, f"after {sequence.__name__} {how}")


def once(model):
    value(model(inputs(dist.get_rank(), requires_grad=True))).backward()


def no_input_gradient(model):
    value(model(inputs(dist.get_rank()))).backward()


def two_forwards_one_backward(model):
    rank = dist.get_rank()
    (value(model(inputs(rank))) + value(model(inputs(rank, 1)))).backward()


def two_forwards_two_backwards(model):
    rank = dist.get_rank()
    first, second = value(model(inputs(rank))), value(model(inputs(rank, 1)))
    first.backward()
    second.backward()


def one_graph_twice(model):
    loss = value(model(inputs(dist.get_rank())))
    loss.backward(retain_graph=True)
    loss.backward()


def evaluations_between(model):
    rank = dist.get_rank()
    with torch.no_grad():
        model(inputs(rank))
    loss = value(model(inputs(rank)))
    with torch.inference_mode():
        model(inputs(rank, 2))
    model.eval()
    with torch.no_grad():
        model(inputs(rank, 3))
    model.train()
    loss.backward()


def a_forward_that_is_dropped(model):
    rank = dist.get_rank()
    model(inputs(rank, 5, requires_grad=True))
    value(model(inputs(rank, requires_grad=True))).backward()


def gradient_penalty(model):
    x = inputs(dist.get_rank(), requires_grad=True)
    y = model(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (g.square().sum() + value(y)).backward()


def penalty_kept_over_other_forwards(model):
    """As of a discriminator: the penalty's graph is made first, and used last, by itself."""
    rank = dist.get_rank()
    x = inputs(rank, requires_grad=True)
    (g,) = torch.autograd.grad(value(model(x)), x, create_graph=True)
    value(model(inputs(rank, 1))).backward()
    with torch.no_grad():
        model(inputs(rank, 2))
    value(model(inputs(rank, 3))).backward()
    g.square().sum().backward()


def bound_forward(model):
    forward = model.forward
    value(forward(inputs(dist.get_rank()))).backward()
    value(model(inputs(dist.get_rank(), 1))).backward()


def frozen_then_not(model):
    rank = dist.get_rank()
    model.first.a.weight.requires_grad_(False)
    model.second.requires_grad_(False)
    value(model(inputs(rank, requires_grad=True))).backward()
    model.second.requires_grad_(True)
    value(model(inputs(rank, 1, requires_grad=True))).backward()
    model.first.a.weight.requires_grad_(True)


def unit_alone(model):
    rank = dist.get_rank()
    model.first(inputs(rank)).square().sum().backward()
    value(model(inputs(rank))).backward()


SEQUENCES = [
    once,
    no_input_gradient,
    two_forwards_one_backward,
    two_forwards_two_backwards,
    one_graph_twice,
    evaluations_between,
    a_forward_that_is_dropped,
    gradient_penalty,
    penalty_kept_over_other_forwards,
    bound_forward,
    frozen_then_not,
    unit_alone,
]
SHAPES = [
    "twice",
    "in place",
    "reentrant",
    "non-reentrant",
    "segment",
    "object",
    "dict",
    "side",
    "reentrant shared",
]


def check_sequences(rank, world_size):
    for sequence in SEQUENCES:
        for reshard in (True, None) if world_size < 4 else (2,):
            run(sequence, reshard_after_forward=reshard)


def check_shapes(rank, world_size):
    for how in SHAPES:
        for sequence in (once, two_forwards_one_backward, one_graph_twice, evaluations_between):
            if how.startswith("reentrant") and sequence is one_graph_twice:
                continue  # torch itself refuses
            run(sequence, how, reshard_after_forward=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_order_of_calls_equals_the_twin(run_ranks, world_size):
    run_ranks(check_sequences, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_way_to_a_loss_equals_the_twin(run_ranks, world_size):
    run_ranks(check_shapes, world_size)


def check_branches(rank, world_size):
    """Each rank uses another expert of a unit: nothing hangs, and None means used by nobody."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(world_size + 1))

        def forward(self, x):
            return x + self.experts[rank](x)

    torch.manual_seed(0)
    model = nn.Sequential(Experts(), Experts(), nn.Linear(5, 1)).to(DEVICE)
    for unit in (model[0], model[1], model):
        fully_shard(unit)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(3, 5, device=DEVICE)).sum().backward()
        for block in (model[0], model[1]):
            for i, expert in enumerate(block.experts):
                for param in expert.parameters():
                    assert (param.grad is None) == (i == world_size), "the same on every rank"
                    if param.grad is not None:
                        assert param.grad.full_tensor().abs().sum() > 0
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_may_use_different_parameters(run_ranks, world_size):
    run_ranks(check_branches, world_size)


def check_memory(rank, world_size):
    """A dropped model frees its memory at once, with the collector off."""
    model = build(tied=True).to(DEVICE)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, batch(step, rank, DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()
    groups = [weakref.ref(g) for g in param_groups(model)]
    shards = [weakref.ref(g.weights.shard.untyped_storage()) for g in param_groups(model)]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, layer
        assert all(ref() is None for ref in groups)
        assert all(ref() is None for ref in shards)
    finally:
        gc.enable()


def check_step_before_backward(rank, world_size):
    """As without sharding: a backward through parameters that changed meanwhile is refused."""
    model, _ = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = value(model(inputs(rank)))
    value(model(inputs(rank, 1))).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"run backward before optimizer\.step"):
        loss.backward()
    model.reset_iter_state()
    value(model(inputs(rank, 2))).backward()


def check_zero_grad(rank, world_size):
    """Also while the modules hold full parameters, which have no ``.grad``."""
    model, _ = pair(reshard_after_forward=False)
    for set_to_none in (False, True):
        value(model(inputs(rank))).backward()
        with torch.no_grad():
            model(inputs(rank, 1))
        model.zero_grad(set_to_none)
        grads = [item.sharded.grad for g in param_groups(model) for item in g.managed]
        assert all(grad is None if set_to_none else not grad.any() for grad in grads)


def check_no_growth(rank, world_size):
    """Steps leave nothing behind, with the collector off: no object, and no graph."""
    model, _ = pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def count(steps):
        for step in range(steps):
            value(model(inputs(rank, step, requires_grad=True))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return len(gc.get_objects())

    count(5)
    gc.collect()
    gc.disable()
    try:
        before = count(1)
        assert count(20) - before < 20, "less than one object a step"
    finally:
        gc.enable()


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x, bias, unused):
        return self.a(x) + bias


def check_several_inputs(rank, world_size):
    """A unit is done when the inputs that count have gradients, used or not by others."""
    torch.manual_seed(0)
    plain = nn.ModuleList([TwoInputs() for _ in range(3)]).to(DEVICE)
    model = nn.ModuleList([TwoInputs() for _ in range(3)]).to(DEVICE)
    model.load_state_dict(plain.state_dict())
    for unit in model:
        fully_shard(unit, reshard_after_forward=True)
    for _ in range(2):
        gathered = []
        for units in (plain, model):
            bias = torch.ones(6, device=DEVICE, requires_grad=True)
            unused = torch.ones(6, device=DEVICE, requires_grad=True)
            x = inputs(rank, requires_grad=True)
            for unit in units:
                x = unit(x, bias=bias, unused=unused)
            if units is model:
                # When the shared input has its gradient, all units but the first are done.
                groups = [g for unit in model for g in param_groups(unit)]
                bias.register_hook(
                    lambda _, groups=groups, gathered=gathered: gathered.extend(
                        g.weights.has_full for g in groups
                    )
                )
            x.square().sum().backward()
        assert gathered[1:] == [False] * 2
    compare(model[0], plain[0], "several inputs")


def check_hooks(rank, world_size):
    """Hooks on a sharded parameter fire once per reduced gradient."""
    model, plain = pair()
    seen = []
    model.first.a.weight.register_hook(lambda g: seen.append("hook") or g * 2)
    model.first.a.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(tuple(p.grad.shape))
    )
    for _ in range(2):
        once(model)
    assert seen == ["hook", (9, 6)] * 2
    once(plain)
    expected = plain.first.a.weight.grad.clone()
    dist.all_reduce(expected)
    got = model.first.a.weight.grad.full_tensor()
    torch.testing.assert_close(got, 4 * expected / world_size, rtol=1e-5, atol=1e-6)


def check_kinds(rank, world_size):
    """One unit of a frozen bf16 base, trainable fp32 adapters and a uint8 table."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(7, 7, dtype=torch.bfloat16)
            self.base.requires_grad_(False)
            self.adapter = nn.Linear(7, 7)
            self.codes = nn.Parameter(torch.arange(9, dtype=torch.uint8), requires_grad=False)

        def forward(self, x):
            codes = self.codes[:7].float()
            return self.base(x.bfloat16()).float() + self.adapter(x) * codes

    torch.manual_seed(0)
    plain, model = Adapted().to(DEVICE), Adapted().to(DEVICE)
    model.load_state_dict(plain.state_dict())
    fully_shard(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for _ in range(3):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_([p for p in m.parameters() if p.requires_grad], 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for name, param in plain.named_parameters():
        got = model.get_parameter(name).full_tensor()
        torch.testing.assert_close(got, param.detach(), rtol=1e-5, atol=1e-6)
    # Then the base is unfrozen: two trainable dtypes in one unit.
    for m in (plain, model):
        m.base.requires_grad_(True)
        m(x).square().mean().backward()
    got = model.base.weight.grad.full_tensor()
    torch.testing.assert_close(got, plain.base.weight.grad, rtol=1e-2, atol=1e-3)


def check_borrowed_only(rank, world_size):
    """A tied parameter whose owner never runs gets its gradient from the borrower alone."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.owner, self.middle = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
            self.borrower = nn.Linear(6, 6, bias=False)
            self.borrower.weight = self.owner.weight

        def forward(self, x):
            return self.borrower(self.middle(x))

    torch.manual_seed(0)
    plain, model = Tied().to(DEVICE), Tied().to(DEVICE)
    model.load_state_dict(plain.state_dict())
    for unit in (model.owner, model.middle, model.borrower, model):
        fully_shard(unit)
    for step in range(2):
        for m in (plain, model):
            m.zero_grad()
            m(inputs(rank, step)).square().sum().backward()
        compare(model, plain, "borrowed only")


def check_replaced(rank, world_size):
    model, _ = pair()
    model.first.a.weight = nn.Parameter(torch.zeros(9, 6, device=DEVICE))
    for _ in range(2):  # a forward that failed does not bring the old one back
        with pytest.raises(RuntimeError, match=r"a\.weight: the parameter was replaced"):
            model(inputs(rank))
    assert not model.first.a.weight.any()
    # While it is gathered: neither a reshard nor a state dict take the new one away.
    model, _ = pair()
    model.first.unshard()
    new = model.first.a.weight = nn.Parameter(torch.zeros(9, 6, device=DEVICE))
    model.first.reshard()
    assert model.first.a.weight is new
    assert model.state_dict()["first.a.weight"].data_ptr() == new.data_ptr()
    model, _ = pair()
    model.first.a.bias = None
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a\.bias: the parameter was removed"):
            model(inputs(rank))


def check_module_replaced(rank, world_size):
    """A copy of a model has what the model has, also where a module that held some is gone."""
    model, _ = pair()
    model(inputs(rank)).sum().backward()
    model.zero_grad()
    model.first.a = nn.Linear(6, 9, device=DEVICE).requires_grad_(False)
    model.first.side = model.second.side = None
    clone = copy.deepcopy(model)
    for each in (model, clone):
        each(inputs(rank)).sum().backward()
    for (name, param), copied in zip(model.named_parameters(), clone.parameters(), strict=True):
        assert (param.grad is None) == (copied.grad is None), name
        if param.grad is not None:
            assert torch.equal(param.grad.to_local(), copied.grad.to_local()), name


def check_others(rank, world_size):
    check_memory(rank, world_size)
    check_step_before_backward(rank, world_size)
    check_zero_grad(rank, world_size)
    check_no_growth(rank, world_size)
    check_several_inputs(rank, world_size)
    check_hooks(rank, world_size)
    check_kinds(rank, world_size)
    check_borrowed_only(rank, world_size)
    check_replaced(rank, world_size)
    check_module_replaced(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_memory_hooks_and_kinds_of_parameters(run_ranks, world_size):
    run_ranks(check_others, world_size)


def test_the_vocabulary_of_the_toy_model_is_prime():
    assert all(VOCAB % n for n in range(2, VOCAB))  # so no world size divides it
