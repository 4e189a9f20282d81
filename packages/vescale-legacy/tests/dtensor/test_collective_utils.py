# SPDX-License-Identifier: Apache-2.0
"""Collectives along a mesh dim, uneven parts included."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from testing.ranks import DEVICE
from vescale.legacy.dtensor import Shard, distribute_tensor
from vescale.legacy.dtensor._collective_utils import (
    mesh_all_gather,
    mesh_all_reduce,
    mesh_all_to_all,
    mesh_all_to_all_single,
    mesh_broadcast,
    mesh_reduce_scatter,
    mesh_scatter,
    mesh_wait,
    wait,
)


def check_collectives(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    mine = torch.full((2,), float(rank), device=DEVICE)
    work = mesh_broadcast(mine, mesh, async_op=True)
    work.wait()
    assert mine.tolist() == [0.0, 0.0]
    parts = [torch.full((2,), 10.0 * rank + i, device=DEVICE) for i in range(world_size)]
    mesh_scatter(mine, parts, mesh)
    assert mine.tolist() == [float(rank)] * 2
    for shape, dim in (((7, 3), 0), ((3, 7), 1), ((1, 3), 0), ((6, 2), 0)):
        x = torch.arange(float(torch.Size(shape).numel()), device=DEVICE).view(shape)
        part = distribute_tensor(x, mesh, [Shard(dim)]).to_local()
        assert torch.equal(mesh_all_gather(part, shape, mesh, dim, 0), x)
        reduced = mesh_reduce_scatter(x, mesh, "sum", dim, 0)
        assert torch.equal(reduced, part * world_size)
        assert torch.equal(mesh_all_reduce(x, mesh, dist.ReduceOp.SUM, 0), x * world_size)
    outputs = [torch.empty(rank + 1, device=DEVICE) for _ in range(world_size)]
    inputs = [torch.full((i + 1,), float(rank), device=DEVICE) for i in range(world_size)]
    mesh_all_to_all(outputs, inputs, mesh)
    assert [out.unique().item() for out in outputs] == list(range(world_size))
    x = torch.arange(4.0 * world_size**2, device=DEVICE).view(2 * world_size, 2 * world_size)
    rows = distribute_tensor(x, mesh, [Shard(0)]).to_local()
    columns = distribute_tensor(x, mesh, [Shard(1)]).to_local()
    assert torch.equal(mesh_all_to_all_single(rows, mesh, 0, 1), columns)
    assert torch.equal(mesh_all_to_all_single(columns, mesh, -1, 0), rows)
    with pytest.raises(ValueError, match="expected two dims"):
        mesh_all_to_all_single(rows[:, :1], mesh, 0, 1)
    with pytest.raises(ValueError, match="give one per rank"):
        mesh_all_to_all([], inputs, mesh)
    assert wait(mine) is mesh_wait(mine, mesh, 0) is mine


def test_collectives_along_one_mesh_dim(run_ranks):
    run_ranks(check_collectives, 3, exact=True)


def check_outside(rank, world_size):
    mesh = DeviceMesh(DEVICE, [0])
    x = torch.full((2, 2), float(rank), device=DEVICE)
    results = (
        mesh_broadcast(x, mesh),
        mesh_all_gather(x, (2, 2), mesh, 0, 0),
        mesh_reduce_scatter(x, mesh, "sum", 0, 0),
        mesh_all_reduce(x, mesh, "sum", 0),
        mesh_all_to_all_single(x, mesh, 0, 1),
    )
    assert x.unique().item() == rank
    assert rank == 0 or all(result is None for result in results)


def test_ranks_outside_take_no_part(run_ranks):
    run_ranks(check_outside, 2, exact=True)
