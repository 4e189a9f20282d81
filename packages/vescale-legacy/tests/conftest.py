# SPDX-License-Identifier: Apache-2.0
"""A world of many ranks in one process, in which a test may be one rank after another."""

import pytest
import torch.distributed as dist


@pytest.fixture
def fake_world(fake_group):
    """Call ``fake_world(rank, world_size)`` to be that rank; calling again changes the rank."""

    def be(rank, world_size):
        if dist.is_initialized():
            dist.destroy_process_group()
        fake_group(world_size, rank)

    return be
