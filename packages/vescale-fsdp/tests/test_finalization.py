# SPDX-License-Identifier: Apache-2.0
"""Backwards that the caller ends, on every version of torch; ``surface`` compares with FSDP2."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import GradientReductionHandle, fully_shard, no_sync
from vescale.fsdp.param_group import State
from vescale.fsdp.units import param_groups


def wrap(world_size=None):
    model = build().to(DEVICE)
    mesh = init_device_mesh(DEVICE, (world_size, 1)) if world_size else None
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model, index, rank):
    loss_of(model, batch(index, rank, DEVICE)).backward()


def equal(model, world_size, steps):
    twin = build().to(DEVICE)
    for index in range(steps):
        for rank in range(world_size):
            (loss_of(twin, batch(index, rank, DEVICE)) / world_size).backward()
    for name, param in twin.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, param.grad, msg=name)
    assert all(group.state is State.SHARDED for group in param_groups(model))


def check_caller_ends(rank, world_size):
    for mesh in (None, world_size):
        model = wrap(mesh)
        model.set_manual_backward_finalization(True)
        for index in range(2):
            step(model, index, rank)
        model.finalize_backward()
        equal(model, world_size, 2)
        model.zero_grad()
        with no_sync(model):
            for index in range(3):
                step(model, index, rank)
            model.finalize_backward()  # without sync nothing is reduced
        assert model.layers[0].up.weight.grad is None
        handle = model.finalize_backward(async_op=True)
        handle.wait()
        handle.wait()
        equal(model, world_size, 3)


def check_partial_sums_go_on_waiting(rank, world_size):
    model = wrap(world_size)
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    step(model, 0, rank)
    model.finalize_backward()
    assert model.layers[0].up.weight.grad is None
    model.set_requires_all_reduce(True)
    step(model, 1, rank)
    model.finalize_backward()
    equal(model, world_size, 2)


def check_refused(rank, world_size):
    model = wrap()
    assert model.finalize_backward() is None
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, GradientReductionHandle)
    handle.wait()
    model.layers[0].set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match="on a module within the root"):
        step(model, 0, rank)
    model.layers[0].set_manual_backward_finalization(False)
    step(model, 0, rank)
    with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization\(True\) before"):
        model.finalize_backward()
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    step(model, 0, rank)
    with pytest.raises(RuntimeError, match="after a backward that began with True"):
        model.set_manual_backward_finalization(False)
    for call in (
        lambda: model.layers[0].set_manual_backward_finalization(True),
        lambda: model.layers[0].finalize_backward(),
    ):
        with pytest.raises(RuntimeError, match="on a module within the root"):
            call()
    handle = model.finalize_backward(async_op=True)
    with pytest.raises(RuntimeError, match="were not waited for"):
        model.finalize_backward()
    with pytest.raises(RuntimeError, match="waited for; call wait"):
        step(model, 0, rank)
    handle.wait()
    equal(model, world_size, 1)
    step(model, 0, rank)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="has dropped the reductions"):
        handle.wait()
    with pytest.raises(TypeError, match="enabled=1"):
        model.set_manual_backward_finalization(1)


def check_refused_inside_of_backward(rank, world_size):
    model = wrap()
    model.set_manual_backward_finalization(True)
    seen = []

    def spoil(_):
        for call in (
            model.finalize_backward,
            lambda: model.set_manual_backward_finalization(False),
        ):
            with pytest.raises(RuntimeError, match="inside of"):
                call()
            seen.append(call)

    loss = loss_of(model, batch(0, rank, DEVICE))
    loss.register_hook(spoil)
    loss.backward()
    assert len(seen) == 2
    model.finalize_backward()
    equal(model, world_size, 1)


def check_all(rank, world_size):
    check_caller_ends(rank, world_size)
    check_partial_sums_go_on_waiting(rank, world_size)
    check_refused(rank, world_size)
    check_refused_inside_of_backward(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_caller_ends_backward(run_ranks, world_size):
    run_ranks(check_all, world_size)
