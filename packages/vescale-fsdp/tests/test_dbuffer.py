# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.distributed as dist

from testing.ranks import DEVICE
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.lanes import plan_lanes
from vescale.fsdp.planner import Request, plan

REQUESTS = [Request("a", 12, 4), Request("b", 5), Request("empty", 0), Request("whole", 7, 7)]


def values(index, numel):
    return torch.arange(float(numel), device=DEVICE) + 100 * index


def fill(buffer):
    buffer.allocate_shard()
    for index, request in enumerate(REQUESTS):
        begin, _, numel = buffer.plan.local_range(index, buffer.rank)
        buffer.shard_views(buffer.shard)[index].copy_(
            values(index, request.numel)[begin : begin + numel]
        )


def check_gather(rank, world_size, lanes):
    p = plan_lanes(REQUESTS, world_size, align=4, lanes=lanes)
    for dtype, full_dtype in ((torch.float32, None), (torch.float32, torch.bfloat16)):
        buffer = DBuffer(
            p, dist.group.WORLD, dtype=dtype, device=torch.device(DEVICE), full_dtype=full_dtype
        )
        fill(buffer)
        assert not buffer.has_full
        with pytest.raises(RuntimeError, match="allocate_full"):
            buffer.view(0)
        for _ in range(2):
            buffer.all_gather()
            buffer.wait_gather()
            for index, request in enumerate(REQUESTS):
                torch.testing.assert_close(
                    buffer.view(index), values(index, request.numel).to(full_dtype or dtype)
                )
            view = buffer.view(1)
            version = view._version
            buffer.free_full()
            assert view.untyped_storage().nbytes() == 0
            if world_size == 1:  # else the collective may still hold some
                assert buffer.full_views() == 1, "the view, and not what the buffer keeps itself"
        buffer.all_gather()
        buffer.wait_gather()
        # A view that was taken before is valid again, and autograd sees no modification.
        torch.testing.assert_close(view, values(1, 5).to(full_dtype or dtype))
        assert view._version == version


def reduce(buffer):
    work = buffer.reduce_scatter()
    if work is not None:  # one rank has nobody to wait for
        work.wait()


def check_reduce(rank, world_size, lanes):
    p = plan_lanes(REQUESTS, world_size, align=4, lanes=lanes)
    buffer = DBuffer(p, dist.group.WORLD, dtype=torch.float32, device=torch.device(DEVICE))
    buffer.allocate_full().zero_()
    for index, request in enumerate(REQUESTS):
        buffer.view(index).copy_(values(index, request.numel) * (rank + 1))
    reduce(buffer)
    total = world_size * (world_size + 1) / 2
    for index, request in enumerate(REQUESTS):
        begin, _, numel = p.local_range(index, rank)
        expected = values(index, request.numel)[begin : begin + numel] * total
        torch.testing.assert_close(buffer.shard_views(buffer.shard)[index], expected)


def check_pieces(rank, world_size, lanes):
    """A tail behind every part travels along, and no tensor reaches into it."""
    p = plan_lanes(REQUESTS, world_size, align=4, lanes=lanes)
    device = torch.device(DEVICE)
    buffer = DBuffer(p, dist.group.WORLD, dtype=torch.float32, device=device, tail=3)
    buffer.allocate_full().fill_(-1)
    for index, request in enumerate(REQUESTS):
        pieces = buffer.pieces(p.offsets[index], request.numel)
        assert len(pieces) <= 3
        start = 0
        for piece in pieces:
            flat = values(index, request.numel)[start : start + piece.numel()]
            piece.copy_(flat.view(piece.shape))
            start += piece.numel()
        assert start == request.numel
    assert (buffer.tails() == -1).all()
    assert buffer.tails().shape == (world_size, 3)
    with pytest.raises(RuntimeError, match="pieces"):
        buffer.view(0)
    reduce(buffer)
    assert (buffer.shard[p.shard_numel :] == -world_size).all()
    for index, request in enumerate(REQUESTS):
        begin, _, numel = p.local_range(index, rank)
        expected = values(index, request.numel)[begin : begin + numel] * world_size
        torch.testing.assert_close(buffer.shard_views(buffer.shard)[index], expected)


def check_mismatch(rank, world_size):
    with pytest.raises(ValueError, match=f"plan is for {world_size + 1} ranks"):
        DBuffer(
            plan(REQUESTS, world_size + 1),
            dist.group.WORLD,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


def check_all(rank, world_size):
    for lanes in (1, 2, 3):
        check_gather(rank, world_size, lanes)
        check_reduce(rank, world_size, lanes)
        check_pieces(rank, world_size, lanes)
    check_mismatch(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gather_and_reduce_on_views_of_one_buffer(run_ranks, world_size):
    run_ranks(check_all, world_size)
