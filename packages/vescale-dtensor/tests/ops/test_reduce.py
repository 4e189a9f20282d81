# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor
from vescale.dtensor.debug import CommDebugMode

UNITS = {1: (4,), 2: (1, 3), 3: (1, 0, 3), 4: (2, 0, 1, 1)}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(found, expected):
    assert type(found) is DTensor
    assert found.shape == expected.shape
    assert found.dtype == found._spec.tensor_meta.dtype == expected.dtype
    tight = expected.dtype in (torch.float16, torch.bfloat16)  # sums are formed in float32
    options = {"rtol": 1e-2, "atol": 1e-2} if tight else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.full_tensor(), expected, equal_nan=True, **options)


WHOLE = [
    torch.sum,
    torch.mean,
    torch.max,
    torch.min,
    torch.amax,
    torch.amin,
    torch.any,
    torch.all,
    lambda t: t.prod(),
    lambda t: t.isnan().any(),
    lambda t: (t > -100).all(),
    lambda t: t.sum(dtype=torch.float64),
    lambda t: t.sum((0, 1, 2)),
    lambda t: t.sum((0, 1, 2), keepdim=True),
    lambda t: t.norm(),
    lambda t: t.norm(3.0),
    lambda t: torch.linalg.vector_norm(t, keepdim=True),
    torch.linalg.norm,
]


def check_whole(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    t = numbers(8, 6, 2)
    every = [
        RaggedShard((0,), UNITS[world_size]),
        RaggedShard((0, 1), [6 * n for n in UNITS[world_size]]),
        RaggedShard((), [0] * (world_size - 1) + [1]),
    ]
    for placement, function in itertools.product(every, WHOLE):
        x = distribute_tensor(t, mesh, [placement])
        with CommDebugMode() as mode:
            found = function(x)
        assert mode.get_total_counts() == 1
        assert found.placements == (Replicate(),)
        close(found, function(t))
    ints = (t * 5).long()
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.bfloat16, torch.float64):
        s = ints.abs().to(dtype)
        x = distribute_tensor(s, mesh, every[:1])
        names = [torch.sum, torch.any, torch.all, torch.max, torch.min]
        for function in names + [torch.mean] * dtype.is_floating_point:
            close(function(x), function(s))
    s = torch.complex(t, t + 1)
    x = distribute_tensor(s, mesh, every[:1])
    for function in (torch.sum, torch.mean, torch.linalg.vector_norm):
        close(function(x), function(s))
    with pytest.raises(NotImplementedError, match="complex"):
        x.prod()
    with pytest.raises(RuntimeError, match="dtype"):
        distribute_tensor(ints, mesh, every[:1]).mean()
    for where in range(8):  # a NaN on any rank is seen on all
        s = t.clone()
        s[where, 1, 1] = math.nan
        x = distribute_tensor(s, mesh, every[:1])
        for function in (
            torch.max,
            torch.min,
            torch.sum,
            lambda t: torch.linalg.vector_norm(t, math.inf),
        ):
            close(function(x), function(s))
        assert x.isnan().any().item()
    for placement, function in itertools.product(every, (torch.var, torch.std)):
        x = distribute_tensor(t, mesh, [placement])
        close(function(x), function(t))
        close(function(x, correction=0), function(t, correction=0))
        for found, expected in zip(torch.var_mean(x), torch.var_mean(t), strict=True):
            close(found, expected)
    y = distribute_tensor(t, mesh, every[:1])
    z = y.clone()
    assert torch.equal(y, z)
    assert torch.allclose(y, z)
    z.to_local().add_(1e-3 * (rank == world_size - 1))
    assert not torch.equal(y, z)
    assert not torch.allclose(y, z)
    assert torch.allclose(y, z, atol=1e-2)
    with pytest.raises(NotImplementedError, match=r"aten\.allclose.*cut alike"):
        torch.allclose(y, t)
    with pytest.raises(NotImplementedError, match="redistribute"):
        torch.equal(y, distribute_tensor(t, mesh, [Replicate()]))


OF_DIMS = [
    lambda t, d, k: t.sum(d, keepdim=k),
    lambda t, d, k: t.mean(d, keepdim=k),
    lambda t, d, k: t.amax(d, keepdim=k),
    lambda t, d, k: t.amin(d, keepdim=k),
    lambda t, d, k: (t > 0).any(d, keepdim=k),
    lambda t, d, k: (t > 0).all(d, keepdim=k),
    lambda t, d, k: t.bfloat16().sum(d, keepdim=k, dtype=torch.float32),
    lambda t, d, k: torch.linalg.vector_norm(t, 2, d, keepdim=k),
    lambda t, d, k: torch.linalg.vector_norm(t, 0, d, keepdim=k),
    lambda t, d, k: torch.linalg.vector_norm(t, math.inf, d, keepdim=k),
    lambda t, d, k: torch.linalg.vector_norm(t, -math.inf, d, keepdim=k),
    lambda t, d, k: t.norm(3, d, keepdim=k),
    lambda t, d, k: t.var(d, keepdim=k),
    lambda t, d, k: t.bfloat16().std(d, correction=0, keepdim=k),
]


def check_dims(mesh, t, placements, dims):
    x = distribute_tensor(t, mesh, placements)
    for function, keepdim in itertools.product(OF_DIMS, (False, True)):
        close(function(x, dims, keepdim), function(t, dims, keepdim))
    if len(dims) == 1:
        close(x.prod(dims[0]), t.prod(dims[0]))


def check_some_dims(rank, world_size):
    mesh, t = init_device_mesh(DEVICE, (world_size,)), numbers(8, 3, 2)
    for placement in (
        RaggedShard((0,), UNITS[world_size]),
        RaggedShard((0, 1, 2), (7, *[0] * (world_size - 2), 41)),
    ):
        for dims in ((0,), (1,), (-1,), (0, 2)):
            check_dims(mesh, t, [placement], dims)
    check_dims(mesh, t, [RaggedShard((), [1] + [0] * (world_size - 1))], (1,))
    x = distribute_tensor(t, mesh, [RaggedShard((0,), UNITS[world_size])])
    with CommDebugMode() as mode:
        found = x.sum((1, 2))
        kept = x.mean(2, keepdim=True)
    assert mode.get_total_counts() == 0
    assert found.placements == kept.placements == x.placements
    with CommDebugMode() as mode:
        found = x.sum(0)
    assert mode.get_total_counts() == 1
    assert found.placements == (Replicate(),)
    nan = t.clone()
    nan[7, 1] = math.nan
    close(distribute_tensor(nan, mesh, x.placements).amax(0), nan.amax(0))


def check_empty(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    t = torch.empty(0, 3, device=DEVICE)
    x = distribute_tensor(t, mesh, [RaggedShard((0,), [1] * world_size)])
    for function in (torch.sum, torch.mean, torch.any, torch.all, torch.linalg.vector_norm):
        close(function(x), function(t))
    close(x.sum(0), t.sum(0))
    close(x.var(), t.var())
    close(x.any(0), t.any(0))
    for function in (torch.max, torch.amin, lambda t: t.amax(0)):
        with pytest.raises((RuntimeError, IndexError)):
            function(x)
    t = torch.tensor(3.0, device=DEVICE)
    x = distribute_tensor(t, mesh, [RaggedShard((), [0] * (world_size - 1) + [1])])
    for function in (torch.sum, torch.max, lambda t: t.sum(0), lambda t: t.sum(-1, keepdim=True)):
        close(function(x), function(t))


def check_two_axes(rank, world_size):
    mesh, t = init_device_mesh(DEVICE, (2, 2)), numbers(8, 6, 2)
    for placements in (
        [RaggedShard((0,), (1, 3)), Shard(0)],
        [RaggedShard((0, 1), (1, 3)), Shard(1)],
        [Shard(2), RaggedShard((0,), (3, 1))],
        [Replicate(), RaggedShard((0,), (3, 1))],
    ):
        x = distribute_tensor(t, mesh, placements)
        for function in WHOLE:
            if (
                "flatten" not in function.__code__.co_names
                if hasattr(function, "__code__")
                else True
            ):
                close(function(x), function(t))
        for dims in ((0,), (1,), (2,), (1, 2)):
            check_dims(mesh, t, placements, dims)


def check_reduce(rank, world_size):
    check_whole(rank, world_size)
    check_empty(rank, world_size)
    if world_size == 3:
        check_some_dims(rank, world_size)
    if world_size == 4:
        check_two_axes(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reductions_equal_those_of_one_process(run_ranks, world_size):
    run_ranks(check_reduce, world_size)


def check_outside(rank, world_size):
    """A rank outside of the mesh takes part in nothing, and waits for nobody."""
    mesh, whole = torch.distributed.device_mesh.DeviceMesh(DEVICE, [0, 1]), numbers(8, 6)
    x = distribute_tensor(whole, mesh, [RaggedShard((0,), (1, 3))])
    x = (x * 2).clone().redistribute(mesh, [RaggedShard((0,), (3, 1))])
    y = x.redistribute(mesh, [Replicate()])
    found = [x.sum(), x.amax(), torch.linalg.vector_norm(x), torch._foreach_norm([x])[0], x.sum(0)]
    if rank < 2:
        assert torch.equal(y.to_local(), 2 * whole)
        torch.testing.assert_close(found[0].to_local(), 2 * whole.sum())
    else:
        assert x.to_local().numel() == 0


def test_a_rank_outside_of_the_mesh_takes_part_in_nothing(run_ranks):
    run_ranks(check_outside, 3, exact=True)
