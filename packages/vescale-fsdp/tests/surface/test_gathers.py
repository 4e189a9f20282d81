# SPDX-License-Identifier: Apache-2.0
"""Methods that say when parameters are gathered and freed, held against FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from testing.side_by_side import Side, compare, our_api
from vescale.fsdp import fully_shard
from vescale.fsdp.param_group import State
from vescale.fsdp.units import param_groups


def unshard_and_reshard(side):
    model = side.model()
    layer = model.layers[0]
    with side.counted():
        assert layer.unshard() is None
        side.look(layer, model.layers[1])
    layer.reshard()
    side.look(layer)
    with side.counted():
        handle = model.layers[1].unshard(async_op=True)
        assert isinstance(handle, side.api.UnshardHandle)
        handle.wait()
        handle.wait()
        side.look(model.layers[1])
    with side.counted():
        side.step(model)  # needs no gather of what is there
    side.look(*model.layers)
    side.gradients(model)


def reshard_after_forward(side, value):
    model = side.model()
    model.set_reshard_after_forward(value)
    for step in range(2):
        with side.counted():
            loss = loss_of(model, batch(step, dist.get_rank(), DEVICE))
            side.look(*model.layers)
            loss.backward()
        side.look(*model.layers)
    model.set_reshard_after_forward(not value, recurse=False)
    with side.counted():
        side.step(model, 2)
    side.gradients(model)


def reshard_after_backward(side):
    model = side.model()
    model.set_reshard_after_backward(False)
    for step in range(2):
        with side.counted():
            side.step(model, step)
        side.look(*model.layers)
    model.set_reshard_after_backward(True)
    model.layers[0].set_reshard_after_backward(False, recurse=False)
    with side.counted():
        side.step(model, 2)
    side.look(*model.layers)
    side.gradients(model)


def prefetch_by_hand(side, forward, backward):
    model = side.model()
    first, second, third = model.layers
    if forward:
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second, third])
    if backward:
        third.set_modules_to_backward_prefetch([second, first])
    for step in range(3):
        with side.counted():
            side.step(model, step)
        side.look(*model.layers)
    first.set_modules_to_forward_prefetch([])
    third.set_modules_to_backward_prefetch([])
    with side.counted():
        side.step(model, 3)
    side.gradients(model)


def no_gather_in_backward(side):
    """An embedding's backward needs no weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(29, 6), nn.Linear(6, 6), nn.Linear(6, 29)).to(DEVICE)
    for part in model:
        side.api.fully_shard(part)
    side.api.fully_shard(model)
    for gather in (True, False):
        model[0].set_unshard_in_backward(gather)
        for step in range(2):
            with side.counted():
                side.step(model, step)
            side.look(*model)
    side.gradients(model)


def async_unshard(side):
    model = side.model()
    model._set_unshard_async_op(True)
    with side.counted():
        side.step(model)
    side.gradients(model)


class Event:
    """In place of an event: CPUs have none."""

    waits = 0

    def wait(self):
        self.waits += 1


def check_against_fsdp2(rank, world_size):
    compare(unshard_and_reshard)
    for value in (True, False):
        compare(reshard_after_forward, value)
    compare(reshard_after_backward, fewer=True)
    for choice in ((True, False), (False, True), (True, True)):
        compare(prefetch_by_hand, *choice)
    _, ours = compare(no_gather_in_backward)
    assert ours.counts[-1][0] < ours.counts[0][0], "one gather less"
    compare(async_unshard)


class Log:
    """Note the order in which units are gathered."""

    def __init__(self, model):
        self.names, self.groups = [], param_groups(model)

    def __enter__(self):
        for group in self.groups:
            group.gather = self._logged(group, group.gather)
        return self.names

    def _logged(self, group, gather):
        def logged():
            if group.state is State.SHARDED:
                self.names.append(group.name)
            gather()

        return logged

    def __exit__(self, *_):
        for group in self.groups:
            del group.gather


def check_prefetch_order(rank, world_size):
    model = Side(our_api()).model()
    first, second, third = model.layers
    model.set_modules_to_forward_prefetch([third, first])
    third.set_modules_to_backward_prefetch([first, second])
    for step in range(2):
        with Log(model) as names:
            loss_of(model, batch(step, rank, DEVICE)).backward()
        forward = ["", "layers.2", "layers.0", "layers.1"]
        assert names == [*forward, "layers.2", "layers.0", "layers.1"], names


class Stage(nn.Module):
    """Nested units, as in a stage of a pipeline."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.parts(x))


def check_recurse(rank, world_size):
    side = Side(our_api())
    model = Stage().to(DEVICE)
    for part in model.parts:
        side.api.fully_shard(part)
    side.api.fully_shard(model)
    handle = model.unshard(async_op=True, recurse=True)
    assert all(g.state is State.GATHERING for g in param_groups(model))
    handle.wait()
    assert all(g.state is State.GATHERED for g in param_groups(model))
    with side.counted():
        model(torch.ones(2, 4, device=DEVICE))
    assert side.counts == [(0, 0)]
    model.unshard(recurse=True)
    model.reshard(recurse=True)
    assert all(g.state is State.SHARDED for g in param_groups(model))
    model.unshard()
    assert [g.state for g in param_groups(model)].count(State.GATHERED) == 1
    model.reshard()


def check_wrong_guess(rank, world_size):
    """A module that needs its weights in backward, against what was said, has them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
    expected = model(torch.ones(2, 4, device=DEVICE)).square().sum()
    grads = torch.autograd.grad(expected, list(model.parameters()))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    for part in model:
        part.set_unshard_in_backward(False)
    model(torch.ones(2, 4, device=DEVICE)).square().sum().backward()
    for param, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), grad)
    assert all(g.state is State.SHARDED for g in param_groups(model))


def check_event(rank, world_size):
    model = fully_shard(build().to(DEVICE))
    event = Event()
    model.set_post_optim_event(event)
    for step in range(2):
        loss_of(model, batch(step, rank, DEVICE)).backward()
    assert event.waits == 1
    model.set_post_optim_event(event)
    model.set_post_optim_event(None)
    loss_of(model, batch(2, rank, DEVICE)).backward()
    assert event.waits == 1
    with pytest.raises(TypeError, match="event=3 is a int"):
        model.set_post_optim_event(3)


def check_arguments(rank, world_size):
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)).to(DEVICE))
    for set_prefetch in (
        model.set_modules_to_forward_prefetch,
        model.set_modules_to_backward_prefetch,
    ):
        with pytest.raises(TypeError, match="modules is a FSDPSequential, expected a list"):
            set_prefetch(model)
        with pytest.raises(ValueError, match="Linear is not wrapped"):
            set_prefetch([model[0]])
    for call in (
        lambda: model.unshard(1),
        lambda: model.reshard(recurse="yes"),
        lambda: model.set_unshard_in_backward(None),
        lambda: model._set_unshard_async_op(0),
    ):
        with pytest.raises(TypeError, match="pass True or False"):
            call()
    with pytest.raises(NotImplementedError, match="symmetric memory"):
        model.set_symm_mem_for_comm()


def check_no_gather_ahead_where_checkpointing_watches(rank, world_size):
    """What checkpointing recomputes is not watched: it is gathered, whatever was chosen."""
    model, twin = build(layers=2).to(DEVICE), build(layers=2).to(DEVICE)
    fully_shard(model.layers[0])
    fully_shard(model)
    model.layers[0].set_unshard_in_backward(False)
    tokens = batch(0, 0, DEVICE)
    checkpoint(model, tokens, use_reentrant=False).square().mean().backward()
    twin(tokens).square().mean().backward()
    for name, param in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)


def check_all(rank, world_size):
    check_no_gather_ahead_where_checkpointing_watches(rank, world_size)
    check_prefetch_order(rank, world_size)
    check_recurse(rank, world_size)
    check_wrong_guess(rank, world_size)
    check_event(rank, world_size)
    check_arguments(rank, world_size)


def test_gathers_are_those_of_fsdp2(run_ranks):
    run_ranks(check_against_fsdp2, 2)


def test_gathers_are_where_the_user_says(run_ranks):
    run_ranks(check_all, 2)
