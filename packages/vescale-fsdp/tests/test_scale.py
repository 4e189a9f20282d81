# SPDX-License-Identifier: Apache-2.0
"""What one rank keeps and does must not grow with the number of ranks; counted, not timed."""

import gc
import tracemalloc
from functools import partial

import torch
import torch.distributed as dist
from benchmarks.scale import measure_kept, measure_wrap
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from testing.growth import count_calls, longest_container, roots_of
from testing.models import batch, build, loss_of
from vescale.fsdp import fully_shard, inspect

FEW, MANY = 8, 10240


def _mesh(start, world_size):
    if dist.is_initialized():
        dist.destroy_process_group()
    start(world_size, rank=world_size // 2)
    return init_device_mesh("cpu", (world_size,))


def _wrapped(mesh):
    model = build()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_nothing_in_a_wrapped_and_trained_model_lists_the_ranks(fake_group):
    model = _wrapped(_mesh(fake_group, MANY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss_of(model, batch(0, 0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    kept = [model.state_dict(), get_model_state_dict(model), optimizer.state_dict()]
    tensors = [x for state in kept for x in _tensors(state)]
    longest = longest_container(*roots_of(model), optimizer, *kept, *(x._spec for x in tensors))
    assert longest < 100  # parameters, attributes of objects
    assert longest_container([0] * MANY) == MANY


def _tensors(state):
    values = state.values() if isinstance(state, dict) else state
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, dict | list):
            yield from _tensors(value)


def test_the_memory_of_a_wrap_does_not_grow_with_the_ranks(fake_group):
    kept = {}
    for world_size in (FEW, MANY):
        mesh = _mesh(fake_group, world_size)
        _wrapped(mesh)  # what is made once
        gc.collect()
        tracemalloc.start()
        try:
            model = _wrapped(mesh)
            gc.collect()
            kept[world_size] = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        parameters = len(list(model.parameters()))
    assert kept[MANY] - kept[FEW] < parameters * 1024, kept


def test_a_step_calls_as_many_functions_on_10240_ranks_as_on_8(fake_group):
    calls = {}
    for world_size in (FEW, MANY):
        model = _wrapped(_mesh(fake_group, world_size))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(model=model, optimizer=optimizer):
            loss_of(model, batch(0, 0)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        calls[world_size] = count_calls(step)
    assert calls[MANY] < 1.2 * calls[FEW], calls


def test_planning_a_checkpoint_calls_as_many_functions_on_10240_ranks_as_on_8(fake_group):
    calls = {}
    for world_size in (FEW, MANY):
        state = _wrapped(_mesh(fake_group, world_size)).state_dict()
        plan = partial(create_default_local_save_plan, state, is_coordinator=False)
        plan()
        calls[world_size] = count_calls(plan)
    assert calls[MANY] < 1.2 * calls[FEW], calls


def test_a_layout_report_of_10240_ranks_lists_none(fake_group):
    layout = inspect.layout(_wrapped(_mesh(fake_group, MANY)))
    assert longest_container(layout) < 100


def test_the_benchmark_finds_what_it_promises(fake_group):
    _mesh(fake_group, MANY)
    found = measure_wrap("vescale", MANY)
    assert found["tensors"] == 615
    assert found["padding"] < 0.18
    assert measure_kept("vescale", MANY)["longest"] < 100
