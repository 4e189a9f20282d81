# SPDX-License-Identifier: Apache-2.0
"""Tensors become DTensors and come back, with values and gradients in the promised layout."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from testing.ranks import DEVICE
from vescale.legacy.dtensor import (
    DTensor,
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    from_local,
    redistribute_dtensor,
    to_local,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def whole(x):
    return redistribute_dtensor(x, placements=[R] * x.device_mesh.ndim, async_op=False).to_local()


def check_distribute(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    for shape in [(8, 4), (7, 3), (1, 5), (0, 2)]:
        x = torch.arange(float(torch.Size(shape).numel()), device=DEVICE).view(shape)
        noise = x if rank == 0 else x + 100 * rank  # the first rank's data is what counts
        for placement in (R, S0, S1, P):
            out = distribute_tensor(noise, mesh, [placement])
            assert type(out) is DTensor
            assert out.placements == (placement,)
            torch.testing.assert_close(whole(out), x, rtol=0, atol=0)
        parts = x.chunk(world_size)
        mine = parts[rank] if rank < len(parts) and x.size(0) else x[:0]
        torch.testing.assert_close(distribute_tensor(x, mesh, [S0]).to_local(), mine)
    summed = distribute_tensor(torch.ones(3, device=DEVICE), mesh, [P])
    assert summed.to_local().tolist() == [float(rank == 0)] * 3
    for op, expected in (("max", 2.0), ("avg", 2.0), ("product", 2.0)):
        kept = distribute_tensor(torch.full((3,), 2.0, device=DEVICE), mesh, [Partial(op)])
        assert kept.to_local().tolist() == [2.0 if rank == 0 or op != "product" else 1.0] * 3
        assert whole(kept).tolist() == [expected] * 3
    leaf = distribute_tensor(torch.ones(4, device=DEVICE, requires_grad=True), mesh, [P])
    assert leaf.is_leaf
    assert leaf.requires_grad
    with mesh:
        assert distribute_tensor(torch.ones(2, device=DEVICE)).placements == (R,)
        assert from_local(torch.ones(2, device=DEVICE)).placements == (R,)


def test_distribute_takes_the_first_ranks_data(run_ranks):
    run_ranks(check_distribute, 3)


def check_two_axes(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2))
    x = torch.arange(35.0, device=DEVICE).view(7, 5)
    for placements in ([S0, S1], [S1, S0], [S0, S0], [P, S0], [R, P], [P, P], [S0, R]):
        out = distribute_tensor(x, mesh, placements)
        torch.testing.assert_close(whole(out), x, rtol=0, atol=0)
        back = from_local(out.to_local(), mesh, placements, run_check=False)
        assert back.shape == x.shape
        assert back.stride() == x.stride()
        torch.testing.assert_close(whole(back), x, rtol=0, atol=0)
    with pytest.warns(UserWarning, match="taken as Replicate"):
        assert distribute_tensor(x, mesh, [S0]).placements == (S0, R)


def test_two_mesh_dims(run_ranks):
    run_ranks(check_two_axes, 4, exact=True)


def check_from_local(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    mine = torch.full((2, 3), float(rank), device=DEVICE)
    same = from_local(mine, mesh, [R])
    assert whole(same).unique().tolist() == [0.0]
    assert same.to_local().data_ptr() == mine.data_ptr()
    free = from_local(torch.full((2, 3), 1.0, device=DEVICE), mesh, [P])
    assert free.shape == (2, 3)
    assert whole(free).unique().tolist() == [float(world_size)]
    uneven = torch.ones(2 if rank < world_size - 1 else 1, 3, device=DEVICE)
    out = from_local(uneven, mesh, [S0])
    assert out.shape == (2 * world_size - 1, 3)
    even = from_local(uneven, mesh, [S0], support_uneven=False)
    assert even.shape == (world_size * uneven.size(0), 3)
    given = from_local(uneven, mesh, [S0], shape=out.shape, stride=out.stride())
    assert given.shape == out.shape
    turned = from_local(torch.ones(3, 2, device=DEVICE).t(), mesh, [Shard(-1)])
    assert (turned.shape, turned.stride()) == ((2, 3 * world_size), (1, 2))
    assert from_local(torch.tensor(1.0, device=DEVICE), mesh, [P]).shape == ()
    with pytest.raises(ValueError, match=r"as torch\.chunk does"):
        from_local(torch.ones(1 + rank, device=DEVICE), mesh, [S0])
    with pytest.raises(ValueError, match="pass both shape and stride"):
        from_local(uneven, mesh, [S0], shape=out.shape)
    with pytest.raises(ValueError, match="does not divide"):
        from_local(torch.ones(3, device=DEVICE), mesh, [InterleavedShard(0, 2)])
    with pytest.raises(RuntimeError, match="No device mesh is currently active"):
        from_local(uneven)


def test_from_local(run_ranks):
    run_ranks(check_from_local, 3)


def check_no_run_check(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    os.environ["VESCALE_DISABLE_RUN_CHECK"] = "1"
    try:
        same = from_local(torch.full((2,), float(rank), device=DEVICE), mesh, [R])
    finally:
        del os.environ["VESCALE_DISABLE_RUN_CHECK"]
    assert same.to_local().tolist() == [rank] * 2


def test_the_environment_turns_the_check_off(run_ranks):
    run_ranks(check_no_run_check, 2)


def check_gradients(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    for asynchronous in (True, False):
        for placement in (R, S0, P):
            leaf = torch.ones(2, 3, device=DEVICE, requires_grad=True)
            x = from_local(leaf * 2, mesh, [placement], async_input=asynchronous)
            y = redistribute_dtensor(x * 3, mesh, [R], async_op=asynchronous)
            to_local(y, async_output=asynchronous).sum().backward()
            assert leaf.grad.tolist() == [[6.0] * 3] * 2
    x = distribute_tensor(torch.ones(4, 3, device=DEVICE), mesh, [R]).requires_grad_()
    y = to_local(x, grad_placements=[P], async_output=False)
    assert type(y) is torch.Tensor
    (y * (rank + 1)).sum().backward()
    assert x.grad.placements == (P,)
    expected = world_size * (world_size + 1) / 2
    assert whole(x.grad).unique().tolist() == [expected]
    cut = distribute_tensor(torch.ones(4, device=DEVICE), mesh, [S0])
    plain = to_local(redistribute_dtensor(cut, mesh, [R]), async_output=False)
    assert type(plain) is torch.Tensor


def test_gradients_come_back_in_the_promised_layout(run_ranks):
    run_ranks(check_gradients, 2)


def check_refusals(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    leaf = torch.ones(4, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match="distribute leaf tensors"):
        distribute_tensor(leaf * 2, mesh, [S0])
    x = distribute_tensor(leaf.detach(), mesh, [S0])
    assert distribute_tensor(x, mesh, [S0]) is x
    with pytest.raises(ValueError, match="to a different placements"):
        distribute_tensor(x, mesh, [R])
    with pytest.raises(ValueError, match="to a different device mesh"):
        distribute_tensor(x, init_device_mesh(DEVICE, (1, world_size)), [R, S0])
    with pytest.raises(ValueError, match="2 placements"):
        distribute_tensor(leaf, mesh, [R, R])
    with pytest.raises(ValueError, match="do not divide"):
        distribute_tensor(torch.ones(6, device=DEVICE), mesh, [InterleavedShard(0, 2)])
    with pytest.raises(RuntimeError, match="got mixed"):
        x + torch.ones(4, device=DEVICE)
    dist.barrier()


def test_mistakes_are_named(run_ranks):
    run_ranks(check_refusals, 2, exact=True)


def check_outside(rank, world_size):
    mesh = DeviceMesh(DEVICE, [0, 1])
    x = distribute_tensor(torch.arange(4.0, device=DEVICE), mesh, [S0])
    assert x.to_local().numel() == (2 if rank < 2 else 0)
    y = from_local(torch.ones(2, device=DEVICE), mesh, [S0])
    assert y.to_local().numel() == (2 if rank < 2 else 0)
    assert (y + y).to_local().sum().item() == (4 if rank < 2 else 0)


def test_ranks_outside_the_mesh_hold_nothing(run_ranks):
    run_ranks(check_outside, 3, exact=True)
