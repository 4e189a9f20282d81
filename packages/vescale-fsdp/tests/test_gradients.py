# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.distributed as dist

from testing.ranks import DEVICE
from vescale.fsdp.gradients import GradientBuffer
from vescale.fsdp.lanes import plan_lanes
from vescale.fsdp.planner import Request, plan

REQUESTS = [Request("a", 6, 3), Request("b", 5), Request("c", 4, 4), Request("d", 3)]


def check_reduction(rank, world_size, dtype, lanes):
    p = plan_lanes(REQUESTS, world_size, align=4, lanes=lanes)
    buffer = GradientBuffer(p, dist.group.WORLD, dtype=dtype, device=torch.device(DEVICE))
    # a: used by all; b: by rank 0 alone, twice; c: by nobody; d: used, but the gradient is zero
    buffer.write(0, torch.full((2, 3), rank + 1.0, device=DEVICE))
    if rank == 0:
        buffer.write(1, torch.full((5,), 2.0, device=DEVICE))
        buffer.write(1, torch.full((5,), 4.0, device=DEVICE, dtype=torch.float64))
    buffer.write(3, torch.zeros(3, device=DEVICE))
    buffer.start(scale=1 / world_size)
    shard = buffer.finish()
    assert shard.shape == (p.shard_numel + 4,)
    assert shard.dtype == dtype
    assert not buffer.written
    assert buffer.unused(shard) == {2}, "on every rank, also where it holds nothing of a tensor"
    mean = (world_size + 1) / 2
    for index, expected in enumerate((mean, 6.0 / world_size, 0.0, 0.0)):
        _, start, numel = p.local_range(index, rank)
        piece = shard[start : start + numel].float()
        rtol = 1e-2 if dtype.itemsize < 4 else 1e-6
        torch.testing.assert_close(piece, torch.full_like(piece, expected), rtol=rtol, atol=0)
    # Padding is zero, so that whole-buffer kernels see nothing else.
    used = sum(p.local_range(i, rank)[2] for i in range(len(REQUESTS)))
    assert (shard[: p.shard_numel] != 0).sum() <= used


def check_all(rank, world_size):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for lanes in (1, 2, 3):
            check_reduction(rank, world_size, dtype, lanes)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_one_reduction_tells_means_and_who_was_used(run_ranks, world_size):
    run_ranks(check_all, world_size)


def check_float16_does_not_overflow(rank, world_size):
    p = plan([Request("a", 8)], world_size)
    buffer = GradientBuffer(p, dist.group.WORLD, dtype=torch.float16, device=torch.device(DEVICE))
    buffer.write(0, torch.full((8,), 60000.0, device=DEVICE))
    buffer.start(scale=1 / world_size)
    assert torch.isfinite(buffer.finish()).all()


def test_float16_is_divided_before_the_sum(run_ranks):
    run_ranks(check_float16_does_not_overflow, 3)


def check_sparse(rank, world_size):
    p = plan([Request("a", 8)], world_size)
    buffer = GradientBuffer(p, dist.group.WORLD, dtype=torch.float32, device=torch.device(DEVICE))
    dense = torch.zeros(4, 2, device=DEVICE)
    dense[rank] = 1.0
    buffer.write(0, dense.to_sparse())
    buffer.start()
    shard = buffer.finish()
    begin, start, numel = p.local_range(0, rank)
    expected = torch.zeros(8, device=DEVICE)
    expected[: 2 * world_size] = 1.0
    torch.testing.assert_close(shard[start : start + numel], expected[begin : begin + numel])


def test_sparse_gradients_are_written_dense(run_ranks):
    run_ranks(check_sparse, 2)


def check_nothing_to_reduce(rank, world_size):
    """Tensors without elements, of which some had no gradient, alone in their group."""
    p = plan([Request("a", 0), Request("b", 0)], world_size, align=4)
    buffer = GradientBuffer(p, dist.group.WORLD, dtype=torch.float32, device=torch.device(DEVICE))
    for written in ((), (1,), (0, 1)):
        for index in written:
            buffer.write(index, torch.empty(0, 4, device=DEVICE))
        buffer.start(scale=1 / world_size)
        shard = buffer.finish()
        assert shard.shape == (0,)
        assert buffer.unused(shard) == set()


def test_tensors_without_elements_need_no_gradient(run_ranks):
    run_ranks(check_nothing_to_reduce, 2)
