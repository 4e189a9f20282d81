# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.distributed as dist
from torch import nn

from testing.ranks import DEVICE
from vescale.fsdp import fully_shard


class Branches(nn.Module):
    """Two units of one size, of which every rank should choose the same."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, which):
        return self.branches[which](x)


def check_other_units(rank, world_size):
    torch.manual_seed(0)
    model = Branches().to(DEVICE)
    for branch in model.branches:
        fully_shard(branch)
    fully_shard(model)
    x = torch.ones(2, 4, device=DEVICE)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with pytest.raises(RuntimeError, match=r"do not gather alike.*branches\.\d.*branches\.\d"):
        model(x, rank % 2)
    dist.set_debug_level(dist.DebugLevel.OFF)
    model.reset_iter_state()
    model(x, 1).sum().backward()


@pytest.mark.parametrize("world_size", [2, 3])
def test_debugging_tells_ranks_at_other_units(run_ranks, world_size):
    run_ranks(check_other_units, world_size, exact=True)
