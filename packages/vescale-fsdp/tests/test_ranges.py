# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from testing.ranks import DEVICE
from vescale.fsdp import fully_shard


def check_ranges(rank, world_size):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (world_size,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        model(torch.ones(2, 4, device=DEVICE)).sum().backward()
    names = [event.name for event in profile.events() if event.name.startswith("vescale.fsdp")]
    # The root is kept for backward; the unit in it is gathered again.
    assert sorted(names) == [
        "vescale.fsdp.gather ",
        "vescale.fsdp.gather 0",
        "vescale.fsdp.gather 0",
        "vescale.fsdp.reduce ",
        "vescale.fsdp.reduce 0",
    ]


def test_a_profiler_shows_gathers_and_reductions_of_each_unit(run_ranks):
    run_ranks(check_ranges, 2)
