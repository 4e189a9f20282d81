# SPDX-License-Identifier: Apache-2.0
import gc
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from testing.collectives import CountCollectives
from testing.models import batch, build, loss_of, reference_step
from testing.ranks import DEVICE
from vescale.fsdp import fully_shard
from vescale.fsdp.collectives import Collectives
from vescale.fsdp.comm_options import CommOptions, can_be_direct
from vescale.fsdp.direct_collectives import (
    GATHER_TAG,
    DirectCollectives,
    _under_way,
    gather_tag,
    sum_in_order,
)
from vescale.fsdp.units import param_groups

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def parts_of(rank, world_size, numel, dtype, seed=0):
    """Return what ``rank`` sends, [world_size, numel]."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(world_size, numel, generator=generator).to(dtype)


def check_gather(rank, world_size):
    direct = DirectCollectives(dist.group.WORLD)
    for dtype in (*DTYPES, torch.uint8, torch.bool):
        sent = [parts_of(r, 1, 5, dtype).flatten() for r in range(world_size)]
        output = torch.empty(world_size * 5, dtype=dtype)
        direct.all_gather(output, sent[rank]).wait()
        assert torch.equal(output, torch.cat(sent))
        output.fill_(0)
        own = output.chunk(world_size)[rank]
        own.copy_(sent[rank])
        direct.all_gather(output, own).wait()  # from its own place
        assert torch.equal(output, torch.cat(sent))


def check_sum_has_the_bits_of_one_process(rank, world_size):
    direct = DirectCollectives(dist.group.WORLD)
    for dtype in DTYPES:
        for numel in (1, 7, 1000):
            everything = [parts_of(r, world_size, numel, dtype) for r in range(world_size)]
            wide = torch.float32 if dtype.itemsize == 2 else dtype
            expected = torch.zeros(numel, dtype=wide)
            for parts in everything:
                expected += parts[rank]
            output = torch.empty(numel, dtype=dtype)
            direct.reduce_scatter(output, everything[rank].flatten(), dist.ReduceOp.SUM).wait()
            assert torch.equal(output, expected.to(dtype)), (dtype, numel)


def check_other_reductions_are_torchs(rank, world_size):
    source = torch.arange(float(world_size)) * (rank + 1)
    output = torch.empty(1)
    work = DirectCollectives(dist.group.WORLD).reduce_scatter(output, source, dist.ReduceOp.MAX)
    work.wait()
    assert output.item() == rank * world_size


def check_many_in_flight(rank, world_size):
    """Several of one group at once, waited for in another order, beside the user's own messages."""
    direct = DirectCollectives(dist.group.WORLD)
    works, outputs, sums = [], [], []
    for seed in range(4):
        numel = 10 ** (seed + 1)
        output = torch.empty(world_size * numel)
        source = parts_of(rank, world_size, numel, torch.float32, seed)
        works.append(direct.all_gather(output, source[0].clone()))
        outputs.append(output)
        sums.append(torch.empty(numel))
        works.append(direct.reduce_scatter(sums[-1], source.flatten(), dist.ReduceOp.SUM))
    token = torch.tensor([float(rank)])
    received = torch.empty(1)
    asked = dist.irecv(received, (rank - 1) % world_size)
    dist.isend(token, (rank + 1) % world_size).wait()
    asked.wait()
    assert received.item() == (rank - 1) % world_size
    for work in works[::-1] if rank % 2 else works:
        work.wait()
    for seed, (output, total) in enumerate(zip(outputs, sums, strict=True)):
        numel = 10 ** (seed + 1)
        everything = [
            parts_of(r, world_size, numel, torch.float32, seed) for r in range(world_size)
        ]
        assert torch.equal(output, torch.cat([parts[0] for parts in everything]))
        assert torch.equal(total, sum(parts[rank] for parts in everything))


def check_dropped_works(rank, world_size):
    """What nobody waits for still reaches the others, and its memory is given back later."""
    direct = DirectCollectives(dist.group.WORLD)
    output = torch.empty(world_size * 100_000)
    source = torch.full((100_000,), float(rank))
    if rank == 0:
        direct.all_gather(torch.empty_like(output), source.clone())
        direct.reduce_scatter(source.clone(), output.clone(), dist.ReduceOp.SUM)
        gc.collect()
    else:
        time.sleep(0.1)
        direct.all_gather(output, source).wait()
        assert output[0] == 0
        direct.reduce_scatter(source.clone(), output.clone(), dist.ReduceOp.SUM).wait()
    direct.all_gather(output, source).wait()
    assert torch.equal(output[::100_000], torch.arange(float(world_size)))
    assert _under_way[dist.group.WORLD] == []


def check_two_groups(rank, world_size):
    """Groups that overlap are used in another order on different ranks, as far as they may."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours = [DirectCollectives(mesh[name].get_group()) for name in mesh.mesh_dim_names]
    for turn in range(3):
        works, outputs = [], {}
        for index in (0, 1) if (rank + turn) % 2 else (1, 0):
            outputs[index] = torch.empty(2)
            source = torch.tensor([float(rank)])
            works.append(ours[index].all_gather(outputs[index], source))
            works.append(ours[index].reduce_scatter(source.clone(), torch.ones(2), SUM))
        for work in works:
            work.wait()
        assert outputs[0].tolist() == [rank % 2, rank % 2 + 2]
        assert outputs[1].tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]


SUM = dist.ReduceOp.SUM


def train(model, rank, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ready(model):
    """Return the model without what FSDP2 cannot wrap."""
    model.scale = nn.Parameter(model.scale.detach().reshape(1))
    model.nothing = nn.Parameter(torch.ones(1))
    return model


def wrap(shard, **options):
    model = ready(build())
    for layer in model.layers:
        shard(layer, **options)
    return shard(model, **options)


def check_training(rank, world_size):
    """Chosen by itself on gloo: as one process, to the bit where its sums are the same."""
    reference = ready(build())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    expected = []
    for step in range(3):
        expected.append(reference_step(reference, step, world_size)[rank])
        optimizer.step()
        optimizer.zero_grad()
    mesh = init_device_mesh("cpu", (world_size,))
    model = wrap(fully_shard, mesh=mesh)
    for group in param_groups(model):
        assert type(group.weights.collectives) is DirectCollectives
    with CountCollectives() as counter:
        losses = train(model, rank)
    units, messages = 4, world_size - 1
    gathers = 3 * (2 * units - 1)  # the root stays between forward and backward
    assert counter.counts == {
        "send": gathers * messages,
        "recv": gathers * messages,
        "alltoall_base": 3 * units,
    }
    if world_size in (2, 4):
        assert losses == expected
    theirs = train(wrap(fsdp2_fully_shard, mesh=mesh), rank)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(theirs), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert losses == train(wrap(fully_shard, mesh=mesh), rank)
    assert _under_way[mesh.get_group()] == []


def check_hybrid_training(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    losses = train(wrap(fully_shard, mesh=mesh), rank)
    theirs = train(wrap(fsdp2_fully_shard, mesh=mesh), rank)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(theirs), rtol=1e-5, atol=0)


def check_all(rank, world_size):
    check_gather(rank, world_size)
    check_sum_has_the_bits_of_one_process(rank, world_size)
    check_other_reductions_are_torchs(rank, world_size)
    check_many_in_flight(rank, world_size)
    check_dropped_works(rank, world_size)
    check_training(rank, world_size)
    if world_size == 4:
        check_two_groups(rank, world_size)
        check_hybrid_training(rank, world_size)
    dist.barrier()


@pytest.mark.parametrize("rows", range(2, 10))
def test_sums_are_made_in_order(rows):
    for dtype in DTYPES:
        for numel in (1, 7, 8, 1000):
            parts = parts_of(0, rows, numel, dtype)
            expected = torch.zeros(numel, dtype=torch.float32 if dtype.itemsize == 2 else dtype)
            for part in parts:
                expected += part
            output = torch.empty(numel, dtype=dtype)
            sum_in_order(parts, output)
            assert torch.equal(output, expected.to(dtype)), (dtype, numel)


needs_gloo = pytest.mark.skipif(DEVICE != "cpu", reason="for gloo on CPU tensors only")


@needs_gloo
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_direct_collectives_give_what_one_process_computes(run_ranks, world_size):
    run_ranks(check_all, world_size)


def check_dead_rank(rank, world_size):
    """Ranks that wait for one that has died get an error, not a hang."""
    direct = DirectCollectives(dist.group.WORLD)
    output, source = torch.empty(world_size * 1000), torch.ones(1000)
    direct.all_gather(output, source).wait()
    dist.barrier()
    if rank == world_size - 1:
        return
    with pytest.raises(RuntimeError):
        direct.all_gather(output, source).wait()
    with pytest.raises(RuntimeError):
        direct.reduce_scatter(source, output, dist.ReduceOp.SUM).wait()


@needs_gloo
def test_a_rank_that_died_is_noticed(run_ranks):
    run_ranks(check_dead_rank, 3, exact=True)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(4, 8), nn.Linear(4, 40)

    def forward(self, x, small):
        return (self.small(x) if small else self.large(x)).sum()


def check_different_units(rank, world_size):
    """Ranks that call units of different sizes are told at the timeout, and live on."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model, mesh = Branches(), DeviceMesh.from_group(group, "cpu")
    for unit in (model.small, model.large, model):
        fully_shard(unit, mesh=mesh)
    name = "large" if rank else "small"
    with pytest.raises(RuntimeError, match=f"gather of the parameters of unit '{name}' failed"):
        model(torch.ones(2, 4), small=rank == 0)


@needs_gloo
def test_ranks_at_units_of_different_sizes_get_an_error(run_ranks):
    run_ranks(check_different_units, 2, exact=True)


@pytest.mark.parametrize("numel", [0, 1, 10**9])
def test_tags_are_small_positive_integers(numel):
    assert GATHER_TAG <= gather_tag(numel * 8) < 2**31
    assert gather_tag(numel) != gather_tag(numel + 16)


def test_other_backends_keep_torchs_collectives(fake_group):
    group = fake_group(64)
    assert not can_be_direct(group, CPU)
    assert not can_be_direct(None, CPU)
    for kind in ("auto", "torch"):
        assert type(CommOptions(kind).gathering(group, CPU)) is Collectives
        assert type(CommOptions(kind).reducing(group, CPU)) is Collectives
