# SPDX-License-Identifier: Apache-2.0
import pytest
from benchmarks.planner_beside import finer, ours, padding, theirs


def test_finer_cuts_pad_less():
    for world_size in (8, 64):
        coarse, fine = (padding("gpt-oss-20b", world_size, layout) for layout in (ours, finer))
        assert 0 <= fine < coarse or fine < 0.1


def test_ours_pads_no_more_than_megatron_fsdp():
    pytest.importorskip("megatron_fsdp")
    for world_size in (8, 64):
        assert padding("gpt-oss-20b", world_size, ours) <= padding(
            "gpt-oss-20b", world_size, theirs
        )
