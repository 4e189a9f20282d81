# SPDX-License-Identifier: Apache-2.0
"""A world of many ranks in one process: groups exist, nothing is sent."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def fake_world():
    """Call ``fake_world(rank, world_size)`` to be that rank; calling again changes the rank."""

    def be(rank, world_size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield be
    if dist.is_initialized():
        dist.destroy_process_group()
