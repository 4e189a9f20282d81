# SPDX-License-Identifier: Apache-2.0
"""Parameters that some ranks use and others do not, over more than one backward."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from testing.ranks import DEVICE
from vescale.fsdp import fully_shard, no_sync


class Chain(nn.Module):
    """Layers in a row; those in ``skip`` run, and their outputs are not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x, skip=(), absent=()):
        for index, layer in enumerate(self.layers):
            if index not in absent:
                y = layer(x).tanh()
                x = x if index in skip else y
        return x.square().sum()


class Segments(Chain):
    """Layers by twos, which reentrant checkpointing recomputes; segment n is left out by 10 + n."""

    def __init__(self, recompute=True):
        super().__init__()
        self.recompute = recompute

    def part(self, layers, skip):
        def run(x):
            for index in layers:
                y = self.layers[index](x).tanh()
                x = x if index in skip else y
            return x * 2

        return run

    def forward(self, x, skip=()):
        for index, layers in enumerate(((0,), (1, 2), (3,))):
            run = self.part(layers, skip)
            y = checkpoint(run, x, use_reentrant=True) if self.recompute else run(x)
            x = x if 10 + index in skip else y
        return x.square().sum()


class Tied(nn.Module):
    """The unit that owns the weight never runs, and the one that borrows it is used at times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.owner, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.borrower = nn.Sequential(nn.Linear(5, 5))
        self.borrower[0].weight = self.owner.weight

    def forward(self, x, skip=()):
        y = self.borrower(x)
        return self.last(x if skip else y).square().sum()


def inputs(step, rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)


def wrap(build, **options):
    model = build().to(DEVICE)
    for part in [m for m in model.modules() if type(m) in (nn.Linear, nn.Sequential)]:
        if isinstance(part, nn.Sequential) or part is not getattr(model, "borrower", [None])[0]:
            fully_shard(part, **options)
    return fully_shard(model, **options)


def equal(model, build, world_size, *losses):
    """Hold the gradients against those of one process; a loss is a function (model, rank)."""
    twin = build().to(DEVICE)
    for loss in losses:
        for rank in range(world_size):
            (loss(twin, rank) / world_size).backward()
    for name, param in twin.named_parameters():
        ours = model.get_parameter(name).grad
        assert (ours is None) == (param.grad is None), name
        if ours is not None:
            torch.testing.assert_close(ours.full_tensor(), param.grad, msg=name)


def once(model, rank):
    return model(inputs(0, rank), skip=(2,) if rank == 1 else ())


def again(model, rank):
    return model(inputs(1, rank), skip=(2,) if rank == 1 else ())


def check_two_forwards_then_two_backwards(rank, world_size):
    model = wrap(Chain)
    losses = once(model, rank), again(model, rank)
    for loss in losses:
        loss.backward()
    equal(model, Chain, world_size, once, again)


def check_one_graph_twice(rank, world_size):
    model = wrap(Chain)
    loss = once(model, rank)
    loss.backward(retain_graph=True)
    loss.backward()
    equal(model, Chain, world_size, once, once)


def check_no_sync_then_absent(rank, world_size):
    """What waits on one rank only must be reduced by all, in a pass without that unit."""

    def without(model, rank):
        return model(inputs(1, rank), absent=(2,))

    model = wrap(Chain)
    with no_sync(model):
        once(model, rank).backward()
    without(model, rank).backward()
    equal(model, Chain, world_size, once, without)


def check_lender(rank, world_size):
    model = wrap(Tied)
    once(model, rank).backward()
    equal(model, Tied, world_size, once)


def check_late_gradients(rank, world_size):
    """All-reduces keep their order though gradients of the next backward come in another."""
    model = wrap(Chain, mesh=init_device_mesh(DEVICE, (world_size, 1)))
    model.set_reduce_scatter_max_input_buffers(4)
    model.set_is_last_backward(False)
    once(model, rank).backward()
    model.set_is_last_backward(True)
    again(model, rank).backward()
    equal(model, Chain, world_size, once, again)


def check_rows_of_unused_layers(rank, world_size):
    """Gathers and reductions keep one order on ranks that pass several units by."""
    for skips in ([(), (1, 2)], [(), (0, 1, 2)], [(), (1, 2, 3)], [(0, 3), (1, 2)], [(1, 2)] * 2):

        def loss(model, rank, skips=skips):
            return model(inputs(0, rank), skip=skips[rank % 2])

        for options in ({}, {"mesh": init_device_mesh(DEVICE, (world_size, 1))}):
            model = wrap(Chain, **options)
            loss(model, rank).backward()
            loss(model, rank).backward()
            equal(model, Chain, world_size, loss, loss)


def several(skips, absent=False):
    """Return losses of forwards of which each rank leaves other layers out."""
    name = "absent" if absent else "skip"

    def loss(step):
        return lambda model, rank: model(
            inputs(step, rank).requires_grad_(), **{name: skips[step][rank]}
        )

    return [loss(step) for step in range(len(skips))]


SEVERAL = (
    # By forward and rank.
    [[(1, 3), (3,), ()], [(0, 1, 2), (1, 2), (3,)]],
    [[(0,), (0, 2), (1,)], [(1, 2), (), (0, 3)], [(2,), (1,), (0, 1)]],
    [[(0, 1, 2, 3), (), (2,)], [(), (0, 1, 2, 3), (0, 1, 2, 3)]],
)


def check_several_graphs(rank, world_size):
    """Ranks leave other layers out of graphs that are alive together, in any order of backwards."""
    for skips in SEVERAL:
        losses = several(skips)
        for options in ({}, {"mesh": init_device_mesh(DEVICE, (world_size, 1))}):
            for order in (sum, reversed, iter):
                model = wrap(Chain, **options)
                values = [loss(model, rank) for loss in losses]
                for value in [sum(values)] if order is sum else order(values):
                    value.backward()
                equal(model, Chain, world_size, *losses)


def check_a_graph_beside_one_that_is_kept(rank, world_size):
    model = wrap(Chain)
    losses = several(SEVERAL[1])
    kept = losses[0](model, rank)
    kept.backward(retain_graph=True)
    (kept + losses[1](model, rank)).backward()
    equal(model, Chain, world_size, losses[0], losses[0], losses[1])
    # A loss that nobody looks at again, and one whose graph is gone.
    unused = losses[2](model, rank)
    model.zero_grad()
    losses[1](model, rank).backward()
    equal(model, Chain, world_size, losses[1])
    assert unused.requires_grad


def check_absent_on_one_replica(rank, world_size):
    """A layer that only some replicas call is reduced by all, in the order of all."""
    mesh = init_device_mesh(DEVICE, (world_size, 1))
    for absent in (
        [[(1,), (), (2, 3)]],
        [[(0, 1, 2, 3), (), (0,)]],
        [[(2,), (2,), (2,)]],
        [[(0, 1), (2, 3), (1, 2)], [(3,), (), (0, 1, 2)]],
    ):
        losses = several(absent, absent=True)
        model = wrap(Chain, mesh=mesh)
        for loss in losses:  # one after the other, then both at once
            loss(model, rank).backward()
        equal(model, Chain, world_size, *losses)
        model.zero_grad()
        sum(loss(model, rank) for loss in losses).backward()
        equal(model, Chain, world_size, *losses)
        model.zero_grad()
        with no_sync(model):
            losses[0](model, rank).backward()
        losses[-1](model, rank).backward()
        equal(model, Chain, world_size, losses[0], losses[-1])


RECOMPUTED = (
    [[(11,), (), (10, 12)]],
    [[(1,), (2, 10), (11,)]],
    [[(10, 11, 12), (), (2,)]],
    [[(12,), (1,), (10,)], [(2,), (11,), (10, 12)]],
)


def check_reentrant_checkpointing(rank, world_size):
    """Units that it recomputes on some ranks only."""
    for skips in RECOMPUTED:
        losses = several(skips)
        for options in ({}, {"mesh": init_device_mesh(DEVICE, (world_size, 1))}):
            model = wrap(Segments, **options)
            sum(loss(model, rank) for loss in losses).backward()
            equal(model, partial(Segments, recompute=False), world_size, *losses)


def check_all(rank, world_size):
    check_reentrant_checkpointing(rank, world_size)
    check_several_graphs(rank, world_size)
    check_a_graph_beside_one_that_is_kept(rank, world_size)
    check_absent_on_one_replica(rank, world_size)
    check_two_forwards_then_two_backwards(rank, world_size)
    check_one_graph_twice(rank, world_size)
    check_no_sync_then_absent(rank, world_size)
    check_lender(rank, world_size)
    check_late_gradients(rank, world_size)
    check_rows_of_unused_layers(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_reduces_what_one_of_them_used(run_ranks, world_size):
    run_ranks(check_all, world_size)
