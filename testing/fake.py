# SPDX-License-Identifier: Apache-2.0
"""A process group of any size in one process, which pretends to communicate."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def fake_group():
    """Return ``start(world_size, rank=0)``, which makes a fake default group and returns it.

    Its collectives return at once and leave their outputs as they are. One start a test.
    """

    def start(world_size, rank=0):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return dist.group.WORLD

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
