# SPDX-License-Identifier: Apache-2.0
"""The gathers that the benchmark times are those of a layout in lanes, and its fit is right."""

import pytest
import torch
from benchmarks.lanes import cut, fit, gather

from testing.ranks import DEVICE
from vescale.fsdp.lanes import plan_lanes
from vescale.fsdp.planner import Request

REQUESTS = [Request("a", 1000, 10), Request("none", 0), Request("b", 900, 9), Request("c", 5)]


def check_gather(rank, world_size):
    for lanes in (1, 2, 3):
        p = plan_lanes(REQUESTS, world_size, align=4, lanes=lanes)
        whole = torch.full((p.buffer_numel,), -1.0, device=DEVICE)
        values = [
            torch.arange(r.numel, device=DEVICE) + 10_000.0 * i for i, r in enumerate(REQUESTS)
        ]
        shard = torch.zeros(p.shard_numel, device=DEVICE)
        for i, value in enumerate(values):
            begin, start, numel = p.local_range(i, rank)
            shard[start : start + numel] = value[begin : begin + numel]
        gather(
            [
                (whole.narrow(0, full_start, full_numel), shard.narrow(0, start, numel))
                for start, numel, full_start, full_numel in p.lane_ranges
            ]
        )
        for offset, value in zip(p.offsets, values, strict=True):
            torch.testing.assert_close(whole[offset : offset + len(value)], value, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_launch_gathers_every_lane_to_where_its_tensors_are(run_ranks, world_size):
    run_ranks(check_gather, world_size)


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_parts_are_all_of_the_shard(lanes):
    parts = cut(1 << 14, lanes)
    assert (len(parts), sum(parts)) == (lanes, 1 << 14)
    assert all(part % 64 == 0 for part in parts)


def test_the_fit_finds_the_line_that_the_times_are_on():
    cells = {
        (nbytes, lanes): 3e-5 + 4e-6 * (lanes - 1) + 2e-11 * nbytes
        for nbytes in (1 << 14, 1 << 18, 1 << 22)
        for lanes in (1, 2, 3)
    }
    found = fit(cells)
    assert found["launch"] == pytest.approx(3e-5)
    assert found["lane"] == pytest.approx(4e-6)
    assert found["lane_nbytes"] == pytest.approx(4e-6 / 2e-11)
