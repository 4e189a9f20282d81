# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.distributed as dist

from testing.ranks import DEVICE
from vescale.dtensor import comm
from vescale.dtensor.layout import exchange_counts

MOVED = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
CUTS = {  # world size -> cuts of 12 elements
    1: [(12,), (12,)],
    2: [(6, 6), (5, 7), (0, 12), (12, 0), (1, 11)],
    3: [(4, 4, 4), (1, 0, 11), (0, 12, 0), (3, 4, 5), (0, 6, 6)],
    4: [(3, 3, 3, 3), (1, 5, 2, 4), (0, 0, 12, 0), (6, 0, 6, 0), (9, 1, 1, 1)],
}


def same(a, b):
    """Compare bytes: not every dtype has an equality."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def part(flat, numels, rank):
    return flat[sum(numels[:rank]) : sum(numels[: rank + 1])]


def check_data_moves(rank, world_size):
    group, cuts = dist.group.WORLD, CUTS[world_size]
    for dtype in MOVED:
        whole = torch.arange(12, device=DEVICE).to(dtype)
        for numels in cuts:
            mine = part(whole, numels, rank)
            same(comm.gather(mine, numels, group), whole)
            for source in (0, world_size - 1):
                values = whole if rank == source else torch.zeros_like(whole)
                same(comm.scatter(values, numels, source, group), mine)
                same(comm.broadcast(values, source, group), whole)
            for other in cuts:
                counts = exchange_counts(numels, other, rank)
                same(comm.exchange(mine, *counts, group), part(whole, other, rank))
    lazy = torch.complex(torch.arange(12.0), torch.ones(12)).to(DEVICE).conj()
    numels = cuts[1]
    same(comm.gather(part(lazy, numels, rank), numels, group), lazy.resolve_conj())
    strided = torch.arange(24.0, device=DEVICE)[::2]
    same(comm.gather(part(strided, numels, rank), numels, group), strided.contiguous())


def check_reductions(rank, world_size):
    group, ranks = dist.group.WORLD, range(1, world_size + 1)
    for numels in CUTS[world_size]:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64):
            whole = torch.arange(1, 13, device=DEVICE).to(dtype)
            mine, total = whole * (rank + 1), sum(ranks)
            want = {"sum": whole * total, "avg": whole * total / world_size}
            if dtype not in (torch.complex64, torch.bfloat16):
                want |= {"max": whole * world_size, "min": whole, "product": 0}
                want["product"] = torch.stack([whole * r for r in ranks]).prod(0)
            for op, expected in want.items():
                if op == "avg" and dtype == torch.int64:
                    continue
                before = mine.clone()
                out = comm.reduce_scatter(mine, numels, op, group)
                torch.testing.assert_close(out, part(expected, numels, rank))
                same(mine, before)
                out = comm.all_reduce(mine.clone(), op, group)
                torch.testing.assert_close(out, expected)


def check_comm(rank, world_size):
    check_data_moves(rank, world_size)
    check_reductions(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_uneven_collectives_carry_every_dtype(run_ranks, world_size):
    run_ranks(check_comm, world_size)


def test_one_element_of_a_column_is_carried_as_bytes(fake_group):
    fake_group(1)
    column = torch.zeros(3, 3, dtype=torch.complex64, device=DEVICE)[:1, 0]
    assert column.is_contiguous()
    assert column.stride() == (3,)
    assert comm.gather(column, [1], dist.group.WORLD).shape == (1,)
    assert comm.exchange(column[:0], [0], [0], dist.group.WORLD).shape == (0,)
