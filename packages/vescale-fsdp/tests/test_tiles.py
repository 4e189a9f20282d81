# SPDX-License-Identifier: Apache-2.0
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale.fsdp import Block, Rows
from vescale.fsdp.planner import Request, plan
from vescale.fsdp.tiles import Tiling, check_block, deserves_blocks, leading_dims

shapes = st.lists(st.integers(1, 40), min_size=2, max_size=4).map(tuple)
blocks = st.one_of(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 300))


@given(shapes, blocks, st.integers(1, 6))
def test_planned_shards_keep_blocks_whole(shape, block, world_size):
    tiling = Tiling(shape, block)
    numel = math.prod(shape)
    unit = tiling.granularity.block_numel(shape)
    assert unit == tiling.band_numel
    layout = plan([Request("w", numel, unit)], world_size)
    assert tiling.fits(layout.shard_runs(0))
    bands = sum(tiling.bands(n) * ranks for n, ranks in layout.shard_runs(0))
    assert bands == tiling.grid[0] == tiling.bands(numel)
    assert tiling.grid[1] * tiling.tile[1] >= tiling.cols


@pytest.mark.parametrize(
    ("runs", "fits"),
    [
        (((64 * 50, 1), (36 * 50, 1)), True),
        (((32 * 50, 3), (4 * 50, 1)), True),
        (((100 * 50, 1), (0, 3)), True),
        (((0, 2), (32 * 50, 1), (68 * 50, 1)), True),
        (((50 * 50, 2),), False),
        (((33 * 50, 1), (67 * 50, 1)), False),
        (((32 * 50 + 1, 1), (68 * 50 - 1, 1)), False),
        (((32 * 50, 1), (4 * 50, 1), (64 * 50, 1)), False),
    ],
)
def test_a_boundary_inside_of_a_tile_is_found(runs, fits):
    assert Tiling((100, 50), (32, 32)).fits(runs) == fits


def test_more_dims_count_as_one_matrix():
    assert leading_dims((8, 128, 64), 32) == 2  # fused experts
    assert leading_dims((64, 32, 3, 3), 32) == 1  # a convolution
    assert leading_dims((64, 32, 32, 32), 32) == 3
    assert Tiling((8, 128, 64), (32, 32)).granularity == Block(2, 32)
    assert Tiling((64, 32, 3, 3), (32, 32)).granularity == Rows(32)
    assert Tiling((64, 32), 256).granularity == Block(2, 256)
    assert Tiling((8, 100, 70), (32, 32)).grid == (25, 3)


def test_only_large_matrices_deserve_blocks():
    assert deserves_blocks((64, 64))
    assert not deserves_blocks((63, 64))
    assert not deserves_blocks((8192,))


@pytest.mark.parametrize("block", [0, -1, 2.5, True, (), (32,) * 3, (32, 0), "32"])
def test_a_wrong_block_is_refused(block):
    with pytest.raises(ValueError, match="expected"):
        check_block(block)
    assert check_block([4, 5]) == (4, 5)
    assert check_block(256) == 256
