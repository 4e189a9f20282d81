# SPDX-License-Identifier: Apache-2.0
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from testing.collectives import CountCollectives
from testing.memory import PeakBytes
from testing.models import build
from testing.ranks import DEVICE
from vescale.fsdp import Elements, Rows, fully_shard, iter_full_parameters


def wrap(model, shard=fully_shard, **options):
    for layer in model.layers:
        shard(layer, **options)
    return shard(model, **options)


def same(found, expected, dtype=None):
    assert [name for name, _ in found] == list(expected)
    for name, whole in found:
        want = expected[name].detach()
        want = want.to(dtype) if dtype and want.is_floating_point() else want
        assert type(whole) is torch.Tensor
        assert not whole.requires_grad
        assert torch.equal(whole, want), name


def check_values(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    for tied in (False, True):
        reference = build(tied=tied).to(DEVICE)
        expected = dict(reference.named_parameters())  # a tie once, by its first name
        for options in ({"granularity": Elements()}, {"granularity": Rows(3)}):
            model = wrap(build(tied=tied).to(DEVICE), mesh=mesh, **options)
            for bucket_bytes in (1, 3000, 256 << 20):
                same([*iter_full_parameters(model, bucket_bytes=bucket_bytes)], expected)
            for dtype in (torch.bfloat16, torch.float64):
                same([*iter_full_parameters(model, dtype=dtype)], expected, dtype)
    # While the root holds whole parameters, and inside of units.
    model.unshard()
    same([*iter_full_parameters(model)], expected)
    model.reshard()
    part = dict(reference.layers[1].named_parameters())
    same([*iter_full_parameters(model.layers[1])], part)
    # Stock FSDP2; plain, ignored, replicated and other parameters in one model.
    stock = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(DEVICE)
    expected = {name: p.detach().clone() for name, p in stock.named_parameters()}
    fsdp2_fully_shard(stock, mesh=mesh)
    same([*iter_full_parameters(stock)], expected)
    mixed = build(seed=3).to(DEVICE)
    mixed.table = nn.Parameter(torch.arange(5, device=DEVICE), requires_grad=False)
    expected = {name: p.detach().clone() for name, p in mixed.named_parameters()}
    for name, placement in (("norm", Replicate()), ("head", Shard(1))):
        module = getattr(mixed, name)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [placement]))
    for layer in mixed.layers:
        fully_shard(layer, mesh=mesh, ignored_params={layer.up.bias})
    for dtype in (None, torch.bfloat16):
        found = [*iter_full_parameters(mixed, dtype=dtype)]
        same(found, expected, dtype)
    # The caller's own: no write reaches the model.
    for _, whole in iter_full_parameters(mixed):
        whole.zero_()
    same([*iter_full_parameters(mixed)], expected)
    assert [*iter_full_parameters(nn.ReLU())] == []


def check_cost(rank, world_size):
    """Few collectives, bounded memory; a loop that is left holds nothing and can be begun anew."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    model = nn.Sequential(*(nn.Linear(64, 60) for _ in range(12))).to(DEVICE)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for layer in model:
        fully_shard(layer, mesh=mesh)
    nbytes = sum(value.nbytes for value in expected.values())
    with CountCollectives() as mode:
        same([*iter_full_parameters(model)], expected)
    assert mode.total == 1, mode.counts
    bucket = nbytes // 4
    with PeakBytes() as memory, CountCollectives() as mode:
        for _, _ in iter_full_parameters(model, bucket_bytes=bucket):
            pass
    assert memory.peak <= 4.1 * bucket, (memory.peak, bucket)
    assert mode.total <= 5 * world_size, mode.counts
    with CountCollectives() as mode:
        assert next(iter(iter_full_parameters(model, bucket_bytes=bucket)))[0] == "0.weight"
    first = mode.total
    iterator = iter_full_parameters(model, bucket_bytes=bucket)
    with CountCollectives() as mode:
        for _, whole in iterator:  # noqa: B007
            break
        reference = weakref.ref(whole)
        del whole, _, iterator
        gc.collect()
        assert reference() is None
    assert mode.total == first  # what was not asked for was not gathered
    same([*iter_full_parameters(model)], expected)
    # Grad mode is the caller's between items.
    for _ in iter_full_parameters(model):
        assert torch.is_grad_enabled()


def check_mistakes(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model = fully_shard(nn.Linear(4, 4).to(DEVICE), mesh=mesh)
    empty = fully_shard(nn.Linear(4, 4, device="meta"), mesh=mesh)
    for error, match, args, options in (
        (TypeError, "model is a list", ([],), {}),
        (TypeError, "dtype=torch.int8", (model,), {"dtype": torch.int8}),
        (TypeError, "dtype='half'", (model,), {"dtype": "half"}),
        (ValueError, "bucket_bytes=0", (model,), {"bucket_bytes": 0}),
        (ValueError, "weight is on the meta device", (empty,), {}),
    ):
        with pytest.raises(error, match=match):
            iter_full_parameters(*args, **options)  # at the call, not at the first item


def check_all(rank, world_size):
    check_values(rank, world_size)
    check_cost(rank, world_size)
    check_mistakes(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameters_come_whole(run_ranks, world_size):
    run_ranks(check_all, world_size)


def test_a_plain_model_needs_no_process_group():
    model = build()
    same([*iter_full_parameters(model)], dict(model.named_parameters()))
