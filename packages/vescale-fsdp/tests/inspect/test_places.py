# SPDX-License-Identifier: Apache-2.0
"""What ``where`` says is what the ranks hold."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from testing.models import build
from testing.ranks import DEVICE
from vescale.fsdp import Elements, Rows, Whole, fully_shard, inspect
from vescale.fsdp.fqns import sharded_parameters
from vescale.fsdp.units import param_groups

GRANULARITIES = (Elements(), Rows(1), Rows(4), Whole())


def wrap(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def check_part(model, fqn, rank, whole):
    """This rank holds what ``where`` says of it, and all parts together are the parameter."""
    found = inspect.where(model, fqn)
    mine = [part for part in found.parts if part.rank == rank]
    local = sharded_parameters(model)[fqn].to_local().reshape(-1)
    block = whole[
        tuple(slice(o, o + n) for o, n in zip(found.part_offset, found.part_shape, strict=True))
    ]
    if not mine:
        assert local.numel() == 0
    for part in mine:
        held = block.reshape(-1)[part.elements.start : part.elements.stop]
        assert torch.equal(local, held), fqn
        if part.rows is not None:
            rows = block[part.rows.start : part.rows.stop]
            assert torch.equal(local, rows.reshape(-1)), fqn
    held = {element for part in found.parts for element in part.elements}
    assert held == set(range(block.numel()))
    return found, mine


def check_values(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("dp",))
    for granularity in GRANULARITIES:
        reference = build().to(DEVICE)
        model = wrap(build().to(DEVICE), mesh=mesh, granularity=granularity)
        buffers = {group.name: group for group in param_groups(model)}
        for fqn, whole in reference.named_parameters():
            found, mine = check_part(model, fqn, rank, whole.detach())
            assert (found.fqn, found.axes, found.ranks) == (fqn, ("dp",), world_size)
            assert found.unit == (fqn[: len("layers.0")] if fqn.startswith("layers") else "")
            shard = buffers[found.unit].weights.shard
            for part in mine:
                held = shard[part.shard_offset : part.shard_offset + len(part.elements)]
                flat = whole.detach().reshape(-1)
                assert torch.equal(held, flat[part.elements.start : part.elements.stop])
        sharded = inspect.where(model, "head.weight")
        model.unshard()
        assert inspect.where(model, "head.weight") == sharded


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_hold_what_where_says(run_ranks, world_size):
    run_ranks(check_values, world_size)


def check_replicas(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = wrap(build().to(DEVICE), mesh=mesh)
    for fqn, whole in build().to(DEVICE).named_parameters():
        found, _ = check_part(model, fqn, rank, whole.detach())
        for part in found.parts:
            assert part.rank == 2 * part.coordinate[0] + part.coordinate[1]
    up = inspect.where(model, "layers.0.up.weight")
    first, second = (
        {part.rank: part.elements for part in up.parts if part.coordinate[0] == replica}
        for replica in (0, 1)
    )
    assert second == {rank + 2: elements for rank, elements in first.items()}


def check_tensor_parallel(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU()).to(DEVICE)
    whole = model[0].weight.detach().clone()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], granularity=Rows(2))
    found, _ = check_part(model, "0.weight", rank, whole)
    tp = rank % 2
    assert (found.shape, found.part_shape, found.part_offset) == ((12, 8), (6, 8), (6 * tp, 0))
    assert [part.rank for part in found.parts] == [tp, 2 + tp]
    assert f"leave this rank [6, 8] from [{6 * tp}, 0]" in str(found)


@pytest.mark.parametrize("check", [check_replicas, check_tensor_parallel])
def test_replicas_and_tensor_parallel_parts_are_told(run_ranks, check):
    run_ranks(check, 4)


def check_table_and_errors(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model = build(tied=True).to(DEVICE)
    model.extra = nn.Parameter(torch.zeros(3, device=DEVICE))
    model.stock = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    ignored = {model.extra, model.stock}
    model = torch.compile(wrap(model, mesh=mesh, granularity=Rows(4), ignored_params=ignored))
    up = inspect.where(model, "layers.1.up.weight")
    text = str(up).splitlines()
    assert text[0].startswith("layers.1.up.weight: [53, 13] float32, at ")
    assert "in the buffer of unit 'layers.1', blocks of 52 elements" in text[0]
    assert text[1].split()[:2] == ["rank", "(0)"]
    assert len(text) == 2 + len(up.parts) + (len(up.parts) < world_size)
    tied = inspect.where(model, "head.weight")
    assert tied.parts == inspect.where(model, "embed.weight").parts
    assert str(inspect.where(model, "nothing")).endswith("2 of 2 ranks hold nothing of it.")
    with pytest.raises(ValueError, match=r"no parameter is called 'layers.1.upp.weight'; near it"):
        inspect.where(model, "layers.1.upp.weight")
    with pytest.raises(ValueError, match=r"near it are \[.*'layers.0.down.bias'"):
        inspect.where(model, "down.bias")
    with pytest.raises(ValueError, match=r"there are \[.* more"):
        inspect.where(model, "§")
    with pytest.raises(ValueError, match=r"it is whole on every rank. .* ignored_params"):
        inspect.where(model, "extra")
    with pytest.raises(ValueError, match=r"it is placed as \(Shard\(dim=0\),\)"):
        inspect.where(model, "stock")


def test_the_table_and_the_errors_say_what_to_do(run_ranks):
    run_ranks(check_table_and_errors, 2)


def test_a_model_that_is_not_wrapped_says_what_to_call():
    with pytest.raises(ValueError, match=r"Linear has no parameter under fully_shard.* call"):
        inspect.where(nn.Linear(2, 2), "weight")
    with pytest.raises(TypeError, match=r"model is a dict, expected an nn\.Module"):
        inspect.where({}, "weight")
