# SPDX-License-Identifier: Apache-2.0
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import fully_shard, no_sync
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.param_group import State
from vescale.fsdp.units import param_groups, unit_of


class Log:
    """Record each collective as (kind, unit name), in the order of the calls."""

    def __init__(self, model):
        self.events = []
        self._names = {id(group.plan): group.name or "root" for group in param_groups(model)}

    def __enter__(self):
        gather, reduce = DBuffer.all_gather, DBuffer.reduce_scatter

        def logged_gather(buffer, **options):
            self.events.append(("gather", self._names[id(buffer.plan)]))
            return gather(buffer, **options)

        def logged_reduce(buffer, *options):
            self.events.append(("reduce", self._names[id(buffer.plan)]))
            return reduce(buffer, *options)

        self._patches = [
            mock.patch.object(DBuffer, "all_gather", logged_gather),
            mock.patch.object(DBuffer, "reduce_scatter", logged_reduce),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()

    def take(self, kind=None):
        events, self.events = self.events, []
        return [name for k, name in events if kind in (None, k)] if kind else events


def wrapped(**options):
    model = build().to(DEVICE)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model)


LAYERS = ["layers.0", "layers.1", "layers.2"]


def check_order(rank, world_size):
    model = wrapped()
    with Log(model) as log:
        for step in range(3):
            loss = loss_of(model, batch(step, rank, DEVICE))
            assert log.take("gather") == ["root", *LAYERS]
            loss.backward()
            events = log.take()
            assert [n for k, n in events if k == "gather"] == LAYERS[::-1]
            assert [n for k, n in events if k == "reduce"] == [*LAYERS[::-1], "root"], events
            # Prefetch: the next gather of backward is under way before a reduction starts.
            assert events.index(("gather", "layers.1")) < events.index(("reduce", "layers.2"))
    for group in param_groups(model):
        assert group.state is State.SHARDED


def check_forward_prefetch(rank, world_size):
    model, seen = wrapped(), []
    second = unit_of(model.layers[1])
    handle = model.layers[0].register_forward_hook(lambda *_: seen.append(second.groups[0].state))
    for step in range(2):
        loss_of(model, batch(step, rank, DEVICE)).backward()
    handle.remove()
    # In the first iteration the order is not known yet.
    assert seen == [State.SHARDED, State.GATHERING]


def check_kept_units_gather_once(rank, world_size):
    model = wrapped(reshard_after_forward=False)
    with Log(model) as log:
        loss = loss_of(model, batch(0, rank, DEVICE))
        assert all(group.state is State.GATHERED for group in param_groups(model))
        loss.backward()
        assert sorted(log.take("gather")) == sorted(["root", *LAYERS])
    with Log(model) as log, torch.no_grad():
        model(batch(0, rank, DEVICE))
        model(batch(0, rank, DEVICE))
        assert log.take("gather").count("layers.1") == 1
    # A step makes what is gathered stale.
    for group in param_groups(model):
        for item in group.managed:
            with torch.no_grad():
                item.sharded.mul_(2)
    with Log(model) as log, torch.no_grad():
        model(batch(0, rank, DEVICE))
        assert log.take("gather").count("layers.1") == 1


def check_no_sync(rank, world_size):
    model = wrapped()
    with Log(model) as log:
        with no_sync(model):
            for step in range(3):
                loss_of(model, batch(step, rank, DEVICE)).backward()
        assert log.take("reduce") == []
        assert model.norm.weight.grad is None
        loss_of(model, batch(3, rank, DEVICE)).backward()
        assert log.take("reduce") == [*LAYERS[::-1], "root"]
    summed = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.numel()}
    model.zero_grad()
    for step in range(4):
        loss_of(model, batch(step, rank, DEVICE)).backward()
    for name, grad in summed.items():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), grad)
    with pytest.raises(KeyError), no_sync(model):
        raise KeyError("inside")
    assert all(group.reduce_options.sync for group in param_groups(model))


def check_unready_unit_waits_for_its_turn(rank, world_size):
    """Ranks that skip different layers' parameters still reduce in one order."""
    model = wrapped()
    if rank == 1:
        skipped = model.layers[2]
        skipped.up.forward = lambda x: x.new_zeros(*x.shape[:-1], skipped.up.out_features)
    with Log(model) as log:
        loss_of(model, batch(0, rank, DEVICE)).backward()
        assert log.take("reduce") == [*LAYERS[::-1], "root"]
    used = model.layers[2].up.weight.grad.full_tensor()
    assert used.abs().sum() > 0


def check_weights_are_freed_between_uses(rank, world_size):
    model, live = wrapped(), []

    def count(*_):
        live.append(sum(g.weights.has_full for g in param_groups(model) if g.name))

    for layer in model.layers:
        layer.register_forward_hook(count)
        layer.register_full_backward_hook(count)
    for step in range(2):
        loss_of(model, batch(step, rank, DEVICE)).backward()
    assert max(live) <= 2, live


def check_backward_on_cpu_holds_two_buffers(rank, world_size):
    """Of one layer: the weights and the gradients, or one of them and that of its neighbour."""
    for options in ({}, {"reshard_after_forward": False}):
        model, most = wrapped(**options), 0
        buffers = [b for g in param_groups(model) if g.name for b in buffers_of(g)]
        allocate = DBuffer.allocate_full

        def counted(buffer, allocate=allocate, buffers=buffers):
            nonlocal most
            full = allocate(buffer)
            most = max(most, sum(b.has_full for b in buffers))
            return full

        for step in range(2):
            loss = loss_of(model, batch(step, rank, DEVICE))
            with mock.patch.object(DBuffer, "allocate_full", counted):
                loss.backward()
        assert most == (len(LAYERS) + 1 if options else 2), most


def buffers_of(group):
    return group.weights, group.reduction._gradients()._buffer


def check_recovery(rank, world_size):
    model, twin = wrapped(), wrapped()

    def fail(*_):
        raise ArithmeticError("on every rank")

    handle = model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        model(batch(0, rank, DEVICE))
    handle.remove()
    assert all(group.state is State.SHARDED for group in param_groups(model))
    loss_of(model, batch(0, rank, DEVICE)).backward()
    model.zero_grad()
    loss = loss_of(model, batch(0, rank, DEVICE))
    handle = model.layers[1].register_full_backward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(model, batch(0, rank, DEVICE)).backward()
    handle.remove()
    del loss
    model.zero_grad()
    model.reset_iter_state()  # what was on its way does not arrive after zero_grad()
    assert all(p.grad is None for p in model.parameters())
    for m in (model, twin):
        loss_of(m, batch(1, rank, DEVICE)).backward()
    for name, p in twin.named_parameters():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(grad.full_tensor(), p.grad.full_tensor(), rtol=0, atol=0)


def check_dead_rank(rank, world_size):
    """The others end, with an error that names the unit that waited."""
    model = wrapped()
    if rank == world_size - 1:
        dist.barrier()
        return  # leaves: its peers find nobody
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"of unit '.*' failed on rank 0"):
        loss_of(model, batch(0, rank, DEVICE)).backward()


def test_a_rank_that_leaves_is_noticed_by_the_others(run_ranks):
    if DEVICE == "cuda":
        pytest.skip("NCCL reports a lost peer through its watchdog, after the timeout")
    run_ranks(check_dead_rank, 2, exact=True)


def check_all(rank, world_size):
    check_order(rank, world_size)
    check_forward_prefetch(rank, world_size)
    check_kept_units_gather_once(rank, world_size)
    check_no_sync(rank, world_size)
    if world_size > 1:
        check_unready_unit_waits_for_its_turn(rank, world_size)
    check_weights_are_freed_between_uses(rank, world_size)
    if DEVICE == "cpu":
        check_backward_on_cpu_holds_two_buffers(rank, world_size)
    check_recovery(rank, world_size)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_come_in_one_order_on_every_rank(run_ranks, world_size):
    run_ranks(check_all, world_size)
