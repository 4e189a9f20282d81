# SPDX-License-Identifier: Apache-2.0
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from testing.models import batch, build, loss_of, reference_step
from testing.ranks import DEVICE
from vescale.fsdp import MixedPrecisionPolicy, comm_options, fully_shard, no_sync
from vescale.fsdp._torch_compat import all_gather_flat, reduce_scatter_flat
from vescale.fsdp.collectives import Collectives
from vescale.fsdp.comm_options import separate_group
from vescale.fsdp.custom_collectives import CustomGather, CustomReduce
from vescale.fsdp.direct_collectives import DirectCollectives
from vescale.fsdp.units import groups_of, param_groups

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Memory:
    """Give fresh memory, or the same memory each time."""

    def __init__(self, persistent):
        self.persistent, self.kept, self.allocated, self.calls = persistent, {}, 0, 0

    def allocate(self, size, *, dtype, device):
        self.allocated += 1
        if not self.persistent:
            return torch.empty(*size, dtype=dtype, device=device)
        (numel,) = size
        pool = self.kept.setdefault(dtype, torch.empty(100_000, dtype=dtype, device=device))
        return pool[:numel]


class Gather(Memory, AllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        assert output_tensor.numel() == input_tensor.numel() * group.size()
        own = output_tensor.chunk(group.size())[group.rank()]
        assert input_tensor.data_ptr() == own.data_ptr()
        return all_gather_flat(output_tensor, input_tensor, group=group, async_op=async_op)


class Reduce(Memory, ReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        return reduce_scatter_flat(output_tensor, input_tensor, op, group, async_op)


def ready():
    """Return a model that FSDP2 can wrap."""
    model = build().to(DEVICE)
    model.scale = nn.Parameter(model.scale.detach().reshape(1))
    model.nothing = nn.Parameter(torch.ones(1, device=DEVICE))
    return model


def wrapped(shard=fully_shard, **options):
    model = ready()
    for layer in model.layers:
        shard(layer, **options)
    return shard(model, **options)


def train(model, rank, steps=3):
    """Return the losses; the first step has two micro-batches, one of them not reduced."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        if step == 0:
            model.set_requires_gradient_sync(False)
            loss_of(model, batch(99, rank, DEVICE)).backward()
            model.set_requires_gradient_sync(True)
        loss = loss_of(model, batch(step, rank, DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reference_losses(rank, world_size, steps=3):
    model = ready()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        if step == 0:
            reference_step(model, 99, world_size, DEVICE)
        losses.append(reference_step(model, step, world_size, DEVICE)[rank])
        optimizer.step()
        optimizer.zero_grad()
    return losses


def units(model):
    return [*model.layers, model]


def customise(model, persistent=False, **options):
    """Give every unit one gather and one reduction, and return them."""
    gather, reduce = Gather(persistent), Reduce(False)
    for unit in units(model):
        unit.set_custom_all_gather(gather, **options)
        unit.set_custom_reduce_scatter(reduce, **options)
    return gather, reduce


def check_custom(rank, world_size):
    expected = reference_losses(rank, world_size)
    theirs = wrapped(fsdp2_fully_shard)
    their_gather, their_reduce = customise(theirs)
    assert_close(train(theirs, rank), expected)
    for persistent, in_place in ((False, False), (True, False), (False, True)):
        model = wrapped()
        gather, reduce = customise(model, persistent, in_place=in_place)
        assert_close(train(model, rank), expected)
        if world_size > 1:
            assert (gather.calls, reduce.calls) == (their_gather.calls, their_reduce.calls)
        copies = world_size > 1 and not in_place
        assert gather.allocated == (gather.calls if copies else 0)
        assert reduce.allocated == (2 * reduce.calls if copies else 0)
    before = gather.calls
    for unit in units(model):
        unit.set_custom_all_gather(None)
        unit.set_custom_reduce_scatter(None)
    train(model, rank, steps=1)
    assert gather.calls == before


def check_custom_with_everything_else(rank, world_size):
    """Other dtypes, several groups in one unit, parameters kept over fewer ranks, prefetches."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in (
        {"mp_policy": policy},
        {"reshard_after_forward": world_size if world_size > 1 else True},
        {"lanes": 2},
    ):
        plain, custom = wrapped(**options), wrapped(**options)
        customise(custom, persistent=True)
        assert_close(train(custom, rank), train(plain, rank))
    models = [ready() for _ in range(2)]
    for model in models:
        model.layers[0].norm.to(torch.bfloat16)
        model.layers[0].norm.register_forward_pre_hook(lambda m, a: (a[0].bfloat16(),))
        model.layers[0].norm.register_forward_hook(lambda m, a, out: out.float())
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    assert len(groups_of(models[0].layers[0], recurse=False)) == 2
    customise(models[1], persistent=True)  # both groups of the unit are under way at once
    for model in models:
        for layer in model.layers:
            layer.unshard(async_op=True)
    assert_close(train(models[1], rank), train(models[0], rank))


def check_what_allocate_may_return(rank, world_size):
    model = wrapped()
    for wrong in (
        lambda size, dtype, device: torch.empty(size[0] + 1, dtype=dtype, device=device),
        lambda size, dtype, device: torch.empty(*size, dtype=torch.float64, device=device),
        lambda size, dtype, device: torch.empty(2 * size[0], dtype=dtype, device=device)[::2],
    ):
        gather = Gather(False)
        gather.allocate = wrong
        model.layers[0].set_custom_all_gather(gather)
        if world_size > 1:
            with pytest.raises(ValueError, match=r"Gather.allocate\(\) returned .* expected"):
                model.layers[0].unshard()
    model.layers[0].set_custom_all_gather(None)
    model.layers[0].unshard()


def check_separate_group(rank, world_size):
    expected = reference_losses(rank, world_size)
    theirs = wrapped(fsdp2_fully_shard)
    getattr(theirs, "set_separate_reduce_scatter_group", lambda: None)()  # since torch 2.13
    assert_close(train(theirs, rank), expected)
    for kind in ("auto", "torch"):
        model = wrapped()
        model.set_collectives(kind)
        model.set_separate_reduce_scatter_group()
        shared = groups_of(model, recurse=True)[0].process_group
        apart = separate_group(shared)
        assert apart is not shared
        assert dist.get_process_group_ranks(apart) == dist.get_process_group_ranks(shared)
        for group in groups_of(model, recurse=True):
            assert group.weights.collectives.group is shared
            assert group.reduction._collectives.group is apart
        assert_close(train(model, rank), expected)
        model.set_separate_reduce_scatter_group(False)
        assert groups_of(model, recurse=True)[0].reduction._collectives.group is shared
        train(model, rank, steps=1)


def check_reductions_in_flight(rank, world_size):
    expected = reference_losses(rank, world_size)
    for limit in (1, 2, 9):
        theirs, model = wrapped(fsdp2_fully_shard), wrapped()
        getattr(theirs, "set_reduce_scatter_max_input_buffers", lambda _: None)(limit)
        assert_close(train(theirs, rank), expected)
        model.set_reduce_scatter_max_input_buffers(limit)
        most = []

        def note(*_, model=model, most=most):
            schedule = model.layers[0]._vescale_unit.schedule
            most.append(len(schedule.turns.reducing))

        for layer in model.layers:
            layer.register_full_backward_hook(note)
        assert_close(train(model, rank), expected)
        assert max(most) <= limit
        if limit > 1:
            assert max(most) > 1


def check_kinds(rank, world_size):
    expected = reference_losses(rank, world_size)
    auto = DirectCollectives if DEVICE == "cpu" else Collectives
    model = wrapped()
    for kind, collectives in (("auto", auto), ("torch", Collectives), ("direct", auto)):
        if kind == "direct" and DEVICE != "cpu":
            with pytest.raises(ValueError, match="for gloo with CPU tensors"):
                model.set_collectives(kind)
            continue
        model = wrapped()
        model.set_collectives(kind)
        for group in param_groups(model):
            assert type(group.weights.collectives) is collectives
        assert_close(train(model, rank), expected)
        model.layers[0].set_collectives("torch", recurse=False)
        assert type(groups_of(model.layers[0], True)[0].weights.collectives) is Collectives
        assert type(groups_of(model, False)[0].weights.collectives) is collectives
    # What is chosen survives a move, and a change while gradients wait for a reduction.
    twin = wrapped()
    with no_sync(twin):
        loss_of(twin, batch(99, rank, DEVICE)).backward()
    twin.set_collectives("torch")
    loss = loss_of(twin, batch(0, rank, DEVICE))
    loss.backward()
    twin.zero_grad()
    twin.double()
    for group in param_groups(twin):
        assert type(group.weights.collectives) is Collectives
        assert type(group.reduction._collectives) is Collectives


def check_group_memory(rank, world_size):
    expected = reference_losses(rank, world_size)
    theirs, model = wrapped(fsdp2_fully_shard), wrapped()
    for unit in units(theirs):
        unit.set_allocate_memory_from_process_group_for_comm(True)
    assert_close(train(theirs, rank), expected)
    for unit in units(model):
        unit.set_allocate_memory_from_process_group_for_comm(True)
    assert_close(train(model, rank), expected)
    # gloo has no allocator: as if it had one
    memory = Memory(False)

    def allocator(numel, *, dtype, device):
        return memory.allocate((numel,), dtype=dtype, device=device)

    with mock.patch.object(comm_options, "backend_allocator", return_value=allocator):
        model = wrapped()
        for unit in units(model):
            unit.set_allocate_memory_from_process_group_for_comm(True)
    for group in groups_of(model, recurse=True):
        assert type(group.weights.collectives) is CustomGather
        assert type(group.reduction._collectives) is CustomReduce
    assert_close(train(model, rank), expected)
    assert (memory.allocated > 0) == (world_size > 1)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_custom_all_gather(Gather(False))
    with pytest.raises(ValueError, match="custom all-gather"):
        model.set_allocate_memory_from_process_group_for_comm(True)


def assert_close(ours, theirs):
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), **CLOSE)


def check_all(rank, world_size):
    check_custom(rank, world_size)
    check_custom_with_everything_else(rank, world_size)
    check_what_allocate_may_return(rank, world_size)
    check_separate_group(rank, world_size)
    check_reductions_in_flight(rank, world_size)
    check_kinds(rank, world_size)
    check_group_memory(rank, world_size)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_of_the_users_choice_train_as_fsdp2s(run_ranks, world_size):
    run_ranks(check_all, world_size)


def check_hybrid(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    expected = reference_losses(rank, world_size)
    theirs, model = wrapped(fsdp2_fully_shard, mesh=mesh), wrapped(mesh=mesh)
    for one in (theirs, model):
        getattr(one, "set_separate_reduce_scatter_group", lambda: None)()
        customise(one)
        assert_close(train(one, rank), expected)


def test_hybrid_sharding_takes_custom_collectives(run_ranks):
    run_ranks(check_hybrid, 4, exact=True)


def test_mistakes_are_named(fake_group):
    fake_group(8)
    mesh = init_device_mesh("cpu", (8,))
    model = fully_shard(nn.Linear(3, 8), mesh=mesh)
    with pytest.raises(TypeError, match="AllGather"):
        model.set_custom_all_gather(lambda: None)
    with pytest.raises(TypeError, match="ReduceScatter"):
        model.set_custom_reduce_scatter(object())
    with pytest.raises(TypeError, match="in_place"):
        model.set_custom_all_gather(Gather(False), in_place=1)
    with pytest.raises(ValueError, match="kind='gloo', expected one of 'auto'"):
        model.set_collectives("gloo")
    with pytest.raises(ValueError, match="for gloo with CPU tensors"):
        model.set_collectives("direct")
    for wrong, error in ((True, TypeError), (1.0, TypeError), (0, ValueError)):
        with pytest.raises(error, match="max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    for setter in (
        model.set_allocate_memory_from_process_group_for_comm,
        model.set_separate_reduce_scatter_group,
    ):
        with pytest.raises(TypeError, match="enable=1"):
            setter(1)
    model.set_separate_reduce_scatter_group()
    assert separate_group(mesh.get_group()).size() == 8
