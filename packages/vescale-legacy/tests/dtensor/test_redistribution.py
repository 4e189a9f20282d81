# SPDX-License-Identifier: Apache-2.0
"""Every layout reaches every other, with equal values, and gradients go back."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from testing.ranks import DEVICE
from vescale.legacy.dtensor import (
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    redistribute_dtensor,
    vescale_all_gather,
    vescale_all_reduce,
    vescale_reduce_scatter,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
IS2, IS4 = InterleavedShard(0, 2), InterleavedShard(0, 4)


def same(x, expected):
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


def check_pair(x, mesh, before, after, asynchronous):
    d = distribute_tensor(x, mesh, before).requires_grad_()
    out = redistribute_dtensor(d, mesh, after, asynchronous)
    assert out.placements == tuple(after)
    assert out.shape == x.shape
    expected = distribute_tensor(x, mesh, after)
    if any(p.is_partial() for p in after):
        whole = [R] * mesh.ndim
        same(redistribute_dtensor(out, mesh, whole).to_local() + 0, x)
        if before == [R] * mesh.ndim:
            same(out.to_local(), expected.to_local())
    else:
        same(out.to_local() + 0, expected.to_local())
    weight = distribute_tensor(
        torch.arange(float(x.numel()), device=DEVICE).view(x.shape),
        mesh,
        [R if p.is_partial() else p for p in after],
    )
    out.backward(weight)
    wanted = [R if p.is_partial() else p for p in before]
    assert d.grad.placements == tuple(wanted)
    full = redistribute_dtensor(d.grad, mesh, [R] * mesh.ndim).to_local()
    same(full + 0, torch.arange(float(x.numel()), device=DEVICE).view(x.shape))


def check_one_axis(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    x = torch.randn(8 * world_size, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for before, after in itertools.permutations([R, P, S0, S1, IS2, IS4], 2):
        check_pair(x, mesh, [before], [after], asynchronous=before is not R)
    uneven = x[: 8 * world_size - 3]
    for before, after in itertools.permutations([R, P, S0, S1], 2):
        check_pair(uneven, mesh, [before], [after], asynchronous=False)
    d = distribute_tensor(x, mesh, [S0])
    assert redistribute_dtensor(d, mesh, [Shard(-2)]) is d
    with pytest.raises(RuntimeError, match="placements is needed"):
        redistribute_dtensor(d)
    with pytest.raises(ValueError, match="to a different device mesh"):
        redistribute_dtensor(d, init_device_mesh(DEVICE, (1, world_size)), [R, R])
    with pytest.raises(ValueError, match="do not divide"):
        redistribute_dtensor(d, mesh, [InterleavedShard(0, 7)])


def test_one_mesh_dim(run_ranks):
    run_ranks(check_one_axis, 2, exact=True)


def check_two_axes(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2))
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    layouts = ([S0, S1], [R, P], [P, S0], [IS2, S1], [S0, IS2], [IS2, S0], [R, IS4], [R, R])
    for before, after in itertools.permutations(layouts, 2):
        check_pair(x, mesh, before, after, asynchronous=True)


def test_two_mesh_dims(run_ranks):
    run_ranks(check_two_axes, 4, exact=True)


def check_collectives(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("DP", "TP"))
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    cut = distribute_tensor(x, mesh, [S0, InterleavedShard(1, 3)])
    assert vescale_all_gather(cut).placements == (R, R)
    assert vescale_all_gather(cut, "DP").placements == (R, InterleavedShard(1, 3))
    same(vescale_all_gather(cut, [0, "TP"]).to_local() + 0, x)
    terms = distribute_tensor(x, mesh, [P, P])
    assert vescale_all_reduce(terms, 1).placements == (P, R)
    same(vescale_all_reduce(terms).to_local() + 0, x)
    parts = vescale_reduce_scatter(terms, scatter_dims=[0], mesh_dims=["TP"])
    assert parts.placements == (R, S0)
    same(vescale_all_gather(parts).to_local() + 0, x)
    assert vescale_reduce_scatter(terms, "TP", 1, "TP", False).placements == (P, S1)
    with pytest.raises(ValueError, match="not sharded"):
        vescale_all_gather(terms, 0)
    with pytest.raises(ValueError, match="not partial"):
        vescale_all_reduce(cut, 0)
    with pytest.raises(ValueError, match="not partial"):
        vescale_reduce_scatter(cut, scatter_dims=0, mesh_dims=0)
    with pytest.raises(ValueError, match="both are needed"):
        vescale_reduce_scatter(terms, scatter_dims=0)
    with pytest.raises(ValueError, match="differ in length"):
        vescale_reduce_scatter(terms, scatter_dims=[0, 1], mesh_dims=0)
    with pytest.raises(ValueError, match="'PP' is no dim"):
        vescale_all_gather(cut, "PP")


def test_named_collectives(run_ranks):
    run_ranks(check_collectives, 4, exact=True)
