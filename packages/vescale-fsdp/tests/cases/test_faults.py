# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, hang or differ: the others hear of it, and of what they waited for."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import MixedPrecisionPolicy, Rows, fully_shard, no_sync
from vescale.fsdp.param_group import State
from vescale.fsdp.units import param_groups

PLACES = ["forward", "backward", "after backward", "step"]


def wrapped(**options):
    model = build().to(DEVICE)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def at(model, optimizer, place, act):
    """Call ``act`` in the middle of the next step's forward, backward or optimizer step."""
    if place == "forward":
        model.layers[1].up.register_forward_pre_hook(lambda *_: act())
    elif place == "backward":
        model.layers[1].up.register_full_backward_pre_hook(lambda *_: act())
    elif place == "after backward":
        model.layers[0].up.weight.register_post_accumulate_grad_hook(lambda _: act())
    else:
        optimizer.register_step_pre_hook(lambda *_: act())


def steps(model, optimizer, rank, count=3):
    for step in range(count):
        loss_of(model, batch(step, rank, DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()


def check_death(rank, world_size, place):
    """A rank is gone at once, without a word: each other one raises and names a unit."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(model, optimizer, rank, 1)
    if rank == world_size - 1:
        at(model, optimizer, place, lambda: os._exit(0))
    with pytest.raises(RuntimeError, match=rf"of unit '.+' failed on rank {rank}: a rank may"):
        steps(model, optimizer, rank)


def check_hang(rank, world_size, place):
    """One rank does not go on: the others raise when the group's time is over."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    model = wrapped(mesh=DeviceMesh.from_group(group, DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()  # in the time of the default group
    if rank == world_size - 1:
        at(model, optimizer, place, lambda: time.sleep(15) or os._exit(0))
    with pytest.raises(RuntimeError, match=rf"of unit '.+' failed on rank {rank}: a rank may"):
        steps(model, optimizer, rank)


@pytest.mark.parametrize("place", PLACES)
def test_the_death_of_a_rank_is_told_with_the_unit_that_waited(run_ranks, place):
    if DEVICE == "cuda":
        pytest.skip("NCCL reports a lost peer through its watchdog, after the timeout")
    run_ranks(check_death, 3, place, exact=True)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_rank_that_hangs_is_told_within_the_timeout(run_ranks, place):
    if DEVICE == "cuda":
        pytest.skip("NCCL reports a lost peer through its watchdog, after the timeout")
    run_ranks(check_hang, 2, place, exact=True)


# --- ranks that wrap different things -----------------------------------------------------------


def refused(match, module=None, **options):
    module = nn.Linear(4, 4).to(DEVICE) if module is None else module
    before = dict(module.named_parameters())
    with pytest.raises(RuntimeError, match=match):
        fully_shard(module, **options)
    assert all(module.get_parameter(name) is param for name, param in before.items())


def check_differences(rank, world_size):
    """Each is named, with both sides, on every rank."""
    odd = rank == world_size - 1
    mine = {True: torch.float64, False: torch.float32}[odd]
    refused(
        r"'weight; dtype=torch\.float32' and 'weight; dtype=torch\.float64'",
        nn.Linear(4, 4, dtype=mine, device=DEVICE),
    )
    refused(
        r"'weight; shape=\(4, 4\)' and 'weight; shape=\(5, 4\)'",
        nn.Linear(4, 4 + odd, device=DEVICE),
    )
    refused(r"Rows\(n=1\).*Rows\(n=2\)", granularity=Rows(1 + odd))
    refused(r"'bias; shape=\(4,\).*' and 'nothing'", nn.Linear(4, 4, bias=not odd, device=DEVICE))
    frozen = nn.Linear(4, 4, device=DEVICE).requires_grad_(not odd)
    refused("requires_grad=True.*requires_grad=False", frozen)
    refused(
        "reshard_after_forward=True.*reshard_after_forward=False", reshard_after_forward=not odd
    )
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if odd else None)
    refused("param_dtype=None.*param_dtype=torch.bfloat16", mp_policy=half)
    # Another module, a layer that only some wrap, and a layer too many.
    refused(
        "Linear over .*ReLU|Linear over .*Sequential",
        nn.Sequential(nn.Linear(4, 4)) if odd else None,
    )
    model = build().to(DEVICE)
    fully_shard(model.layers[0])
    fully_shard(model.layers[1 + odd])  # alike to look at
    with pytest.raises(RuntimeError, match=r"differ first at: .*layers\.[12]"):
        fully_shard(model)
    model = build().to(DEVICE)
    for layer in model.layers[: 2 + odd]:
        if layer is not model.layers[2]:
            fully_shard(layer)
    refused("LanguageModel over .*Block over", model.layers[2] if odd else model)


# --- exceptions on every rank -------------------------------------------------------------------


class Broken(Exception):
    pass


def fail(*_):
    raise Broken


def sharded(model):
    return all(group.state is State.SHARDED for group in param_groups(model))


def check_exceptions(rank, world_size):
    """Inside of forward and backward, twice, also while accumulating: the next step is right."""
    optimizers = []
    models = [wrapped(), wrapped()]
    for model in models:
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=1e-2))
    model, twin = models
    for attempt, place in enumerate(["forward", "backward", "forward", "accumulated"]):
        if place == "accumulated":
            with no_sync(model):
                loss_of(model, batch(9, rank, DEVICE)).backward()
        part = model.layers[2].down
        if place == "forward":
            handle = part.register_forward_hook(fail)
        else:
            handle = part.register_full_backward_hook(fail)
        with pytest.raises(Broken):
            loss_of(model, batch(8, rank, DEVICE)).backward()
        handle.remove()
        model.reset_iter_state()
        model.zero_grad()
        assert sharded(model)
        losses = []
        for one, optimizer in zip(models, optimizers, strict=True):
            losses.append(loss_of(one, batch(attempt, rank, DEVICE)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses), place
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
    # Flags are what they were (row 98).
    for body in (lambda: fail(), lambda: loss_of(model, "no tokens")):
        with pytest.raises((Broken, TypeError)), no_sync(model):
            body()
        assert all(group.reduce_options.sync for group in param_groups(model))


def check_all(rank, world_size):
    check_differences(rank, world_size)
    check_exceptions(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_differences_and_exceptions(run_ranks, world_size):
    run_ranks(check_all, world_size)
