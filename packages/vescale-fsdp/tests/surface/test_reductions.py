# SPDX-License-Identifier: Apache-2.0
"""Methods that say when gradients are reduced, held against FSDP2."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

import vescale.fsdp
from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from testing.side_by_side import compare
from vescale.fsdp import fully_shard, no_sync, register_fsdp_forward_method, share_comm_ctx
from vescale.fsdp.param_group import State
from vescale.fsdp.units import param_groups, unit_of


def gradient_sync(side):
    model = side.model()
    model.set_requires_gradient_sync(False)
    for step in range(3):
        with side.counted():
            side.step(model, step)
        assert model.norm.weight.grad is None
    model.set_requires_gradient_sync(True)
    with side.counted():
        side.step(model, 3)
    side.gradients(model)
    model.layers[0].set_requires_gradient_sync(False, recurse=False)
    with side.counted():
        side.step(model, 4)
    side.gradients(model.layers[1])


def last_backward(side):
    """Micro-batches, of which only the last one waits for its reductions."""
    model = side.model()
    for step in range(3):
        model.set_is_last_backward(step == 2)
        with side.counted():
            side.step(model, step)
        side.look(*model.layers)
    side.gradients(model)
    model.zero_grad()
    with side.counted():
        side.step(model, 3)
    side.gradients(model)


def forwards_and_backwards_of_a_pipeline(side):
    model = side.model()
    rank = dist.get_rank()
    model.set_is_last_backward(False)
    losses = [loss_of(model, batch(step, rank, DEVICE)) for step in range(2)]
    losses[0].backward()
    losses.append(loss_of(model, batch(2, rank, DEVICE)))
    losses[1].backward()
    model.set_is_last_backward(True)
    losses[2].backward()
    side.numbers.append([loss.item() for loss in losses])
    side.gradients(model)


class Branches(nn.Module):
    """Each rank uses another branch."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.parts[dist.get_rank()](x)


def unused_parameters(side):
    torch.manual_seed(0)
    model = nn.Sequential(Branches(), nn.Linear(4, 1)).to(DEVICE)
    for part in (model[0], model):
        side.api.fully_shard(part)
    model.set_reduce_scatter_unused_params(True)
    with side.counted():
        loss = model(torch.ones(2, 4, device=DEVICE)).sum()
        side.numbers.append(loss.item())
        loss.backward()
    # What no rank used has zeros there, and None here.
    side.gradients(model[0].parts[0])
    side.gradients(model[0].parts[1])


def reset_after_failure(side):
    model = side.model()

    def fail(*_):
        raise ArithmeticError("on every rank")

    side.step(model)
    model.zero_grad()
    handle = model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(model, batch(0, dist.get_rank(), DEVICE)).backward()
    handle.remove()
    model.reset_iter_state()
    side.look(*model.layers)
    with side.counted():
        side.step(model, 1)
    side.gradients(model)  # after a failed backward FSDP2 keeps a part of the root's: not ours


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x):
        return self.part(x)

    def encode(self, x, *, scale):
        return self.part(x) * scale


def other_forward_method(side):
    torch.manual_seed(0)
    model = Encoder().to(DEVICE)
    side.api.register_fsdp_forward_method(model, "encode")  # does nothing yet
    side.api.fully_shard(model.part)
    side.api.fully_shard(model)
    side.api.register_fsdp_forward_method(model, "encode")
    for call in (lambda x: model.encode(x, scale=2.0), model, lambda x: model.encode(x, scale=3.0)):
        with side.counted():
            loss = call(torch.ones(2, 4, device=DEVICE)).square().sum()
            side.look(model.part)
            side.numbers.append(loss.item())
            loss.backward()
    side.gradients(model)
    with pytest.raises(ValueError, match="missing"):
        side.api.register_fsdp_forward_method(model, "missing")


def shared_roots(side):
    """Two chunks of a pipeline stage on one rank."""
    torch.manual_seed(0)
    chunks = []
    for _ in range(2):
        chunk = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
        for part in chunk:
            side.api.fully_shard(part)
        chunks.append(side.api.fully_shard(chunk))
    side.api.share_comm_ctx(chunks)
    side.api.share_comm_ctx([])
    for _ in range(2):
        with side.counted():
            x = torch.ones(2, 4, device=DEVICE)
            for chunk in chunks:
                x = chunk(x)
            loss = x.square().sum()
            side.numbers.append(loss.item())
            loss.backward()
    for chunk in chunks:
        side.gradients(chunk)


def check_against_fsdp2(rank, world_size):
    compare(gradient_sync)
    compare(last_backward)
    compare(forwards_and_backwards_of_a_pipeline)
    known = vars(torch.distributed.fsdp.FSDPModule)  # an older torch has fewer methods
    if "set_reduce_scatter_unused_params" in known:
        compare(unused_parameters)
    if "reset_iter_state" in known:
        compare(reset_after_failure)
    compare(other_forward_method)
    compare(shared_roots, fewer=True)


def check_reductions_in_flight(rank, world_size):
    """Two roots that share have no more of them together than one alone."""
    chunks = [fully_shard(nn.Linear(4, 4).to(DEVICE)) for _ in range(2)]
    schedules = []
    for shared in (False, True):
        if shared:
            share_comm_ctx(chunks)
        for chunk in chunks:
            chunk.set_is_last_backward(False)
            chunk(torch.ones(2, 4, device=DEVICE)).sum().backward()
        schedules = [unit_of(chunk).schedule for chunk in chunks]
        under_way = {id(group) for schedule in schedules for group in schedule.turns.reducing}
        assert len(under_way) == (1 if shared else 2)
        for chunk in chunks:
            chunk.set_is_last_backward(True)
            chunk(torch.ones(2, 4, device=DEVICE)).sum().backward()
        assert not any(s.turns.reducing for s in schedules)
    torch.testing.assert_close(
        chunks[0].bias.grad.full_tensor(), torch.full((4,), 8.0, device=DEVICE)
    )
    with pytest.raises(TypeError, match="modules is a FSDPLinear"):
        share_comm_ctx(chunks[0])
    with pytest.raises(ValueError, match="Linear is not wrapped"):
        share_comm_ctx([nn.Linear(2, 2)])


def check_forward_on_the_instance(rank, world_size):
    """A forward that somebody had replaced before the wrap gathers too, and so do copies."""
    import copy

    model = nn.Sequential(nn.Linear(4, 4)).to(DEVICE)
    original = model.forward
    model.forward = lambda x: original(x) + 1
    x = torch.ones(2, 4, device=DEVICE)
    expected = model(x)
    fully_shard(model)
    for call in (model, model.forward):
        assert torch.equal(call(x), expected)
    encoder = fully_shard(Encoder().to(DEVICE))
    register_fsdp_forward_method(encoder, "encode")
    register_fsdp_forward_method(encoder, "encode")
    twin = copy.deepcopy(encoder)
    with torch.no_grad():
        twin.part.weight.zero_()
        twin.part.bias.fill_(1)
    assert torch.equal(twin.encode(x, scale=2.0), torch.full((2, 4), 2.0, device=DEVICE))
    assert not torch.equal(encoder.encode(x, scale=2.0), twin.encode(x, scale=2.0))


def check_parameters_returned_by_forward(rank, world_size):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4))

        def forward(self, x):
            return x @ self.weight.t(), self.weight, self.weight.t()[0]

    plain = nn.Sequential(Returns()).to(DEVICE)
    model = nn.Sequential(Returns()).to(DEVICE)
    fully_shard(model[0])
    fully_shard(model)
    x = torch.ones(2, 4, device=DEVICE)
    for each in (plain, model):
        y, weight, row = each(x)
        (y.sum() + weight.square().sum() + (row * row).sum()).backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)
    assert all(g.state is State.SHARDED for g in param_groups(model))
    with torch.no_grad():
        assert torch.equal(model(x)[1], torch.ones(3, 4, device=DEVICE))


def check_arguments(rank, world_size):
    model = fully_shard(nn.Linear(2, 2).to(DEVICE))
    with pytest.raises(NotImplementedError, match="hangs where another rank"):
        model.set_reduce_scatter_unused_params(False)
    with pytest.raises(TypeError, match="is_last_backward=None"):
        model.set_is_last_backward(None)
    with pytest.raises(RuntimeError), no_sync(model):
        raise RuntimeError("inside")
    assert param_groups(model)[0].reduce_options.sync
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.set_reduce_scatter_divide_factor(2.0)
    assert "set_gradient_divide_factor" in str(caught[0].message)
    assert param_groups(model)[0].reduce_options.divide_factor == 2.0
    assert vescale.fsdp.share_comm_ctx is share_comm_ctx


def check_all(rank, world_size):
    check_reductions_in_flight(rank, world_size)
    check_forward_on_the_instance(rank, world_size)
    check_parameters_returned_by_forward(rank, world_size)
    check_arguments(rank, world_size)
    fully_shard(build().to(DEVICE)).reset_iter_state()  # before any forward: nothing to do


def test_reductions_are_those_of_fsdp2(run_ranks):
    run_ranks(check_against_fsdp2, 2)


def test_reductions_and_forward_methods_of_ours(run_ranks):
    run_ranks(check_all, 2)
