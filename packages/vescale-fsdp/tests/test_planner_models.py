# SPDX-License-Identifier: Apache-2.0
"""The planner on the shapes of published models: targets of padding, and bounds by each order."""

import pytest
from benchmarks.planner import (
    ELEMENT_WISE,
    FEED_FORWARD,
    LAYER_WORLDS,
    WHOLE_MODEL,
    WORLDS,
    one_layer,
    requests,
    whole_model,
)

from vescale.fsdp.granularity import Block
from vescale.fsdp.lanes import plan_lanes
from vescale.fsdp.packing import Group, order_fits
from vescale.fsdp.planner import Request, plan, validate_plan
from vescale.fsdp.shard_search import common_multiple, improve, lower_bound, three_orders
from vescale.fsdp.simulate.shapes import shipped, shipped_units

# Of LAYER_WORLDS, those with the most padding; benchmarks/planner.py tries all.
HARD_WORLDS = (48, 512, 768, 1024)


@pytest.mark.parametrize(("model", "rows"), WHOLE_MODEL)
def test_whole_models_meet_the_targets(model, rows):
    for world_size, single, lanes in zip(WORLDS, *WHOLE_MODEL[model, rows], strict=True):
        cell = whole_model(model, rows, world_size)
        assert round(cell.single, 2) <= single, f"{world_size} ranks"
        assert round(cell.lanes, 2) <= lanes, f"{world_size} ranks"
        assert cell.lanes <= cell.default <= cell.single, f"{world_size} ranks"


@pytest.mark.parametrize(("model", "rows"), FEED_FORWARD)
def test_layers_with_blocks_on_experts_only_meet_the_targets(model, rows):
    single, lanes = FEED_FORWARD[model, rows]
    cell = one_layer(model, rows, HARD_WORLDS)
    assert cell.single <= single + 0.001
    assert cell.lanes <= lanes + 0.001


@pytest.mark.parametrize("model", shipped())
def test_cuts_at_any_element_cost_next_to_nothing_in_one_buffer(model):
    cell = one_layer(model, 0, (*LAYER_WORLDS, 10240))
    assert cell.single <= ELEMENT_WISE
    assert cell.count == 1


@pytest.mark.parametrize("model", shipped())
def test_one_row_costs_next_to_nothing_in_lanes(model):
    for world_size in (64, 256, 1024):
        assert whole_model(model, 1, world_size).lanes <= 1.1


@pytest.mark.parametrize("world_size", [6, 64, 1024])
@pytest.mark.parametrize("model", shipped())
def test_no_order_alone_is_better(model, world_size):
    for unit in shipped_units(model):
        tensors = requests(unit, 128, only="mlp")
        shard = plan(tensors, world_size, align=8).shard_numel
        sizes = [(tensor.numel, min(tensor.block, tensor.numel)) for tensor in tensors]
        group = Group.of(sizes, world_size, 8)
        for runs in three_orders(group):

            def keep(group, shard, runs=runs):
                return runs if order_fits(group, runs, shard) else None

            known = common_multiple(group, runs)
            assert shard <= improve(group, keep, lower_bound(group), known)[0]


def test_an_odd_number_of_ranks_costs_no_more_than_alignment():
    layer = next(unit for unit in shipped_units("llama3-8b") if unit.name == "layer")
    for world_size in (3, 5, 7, 11, 13):
        p = plan(requests(layer, 1), world_size, align=8)
        assert p.shard_numel % 8 == 0
        assert p.padding < 0.05


def test_experts_of_one_model_hold_more_elements_than_32_bits_count():
    layer = next(unit for unit in shipped_units("deepseek-v3-671b-fused") if unit.name == "layer")
    assert plan(requests(layer, 128), 64, align=8).buffer_numel > 2**33


def expert_rows_at_boundaries(p, index, rows, columns):
    """Return the row of an expert at each rank boundary inside tensor ``index`` of rows each."""
    start, numel = p.offsets[index], p.requests[index].numel
    inside = range(start // p.shard_numel + 1, -(-(start + numel) // p.shard_numel))
    cuts = [boundary * p.shard_numel - start for boundary in inside]
    assert all(cut % columns == 0 for cut in cuts)
    return [cut // columns % rows for cut in cuts]


@pytest.mark.parametrize("world_size", [7, 64, 256])
def test_tiles_of_fused_experts_end_with_each_expert_where_they_divide_its_rows(world_size):
    # GPT-OSS-120B: 2880 rows are 22.5 tiles of 128, so the 128 rows of a block are of two experts.
    experts, rows, columns = 128, 2880, 2880
    for tile, whole in ((64, True), (128, False)):
        block = Block(2, tile).block_numel((experts, rows, columns))
        p = plan([Request("down", experts * rows * columns, block), Request("b", 9)], world_size)
        cuts = expert_rows_at_boundaries(p, 0, rows, columns)
        assert cuts
        assert all(cut % tile == 0 for cut in cuts) == whole
        assert (rows % tile == 0) == whole


def test_a_padded_stride_gives_each_fused_expert_tiles_of_its_own():
    # The other way, for tiles of 128 rows: each expert takes 23 of them. Its cost is known before.
    experts, rows, columns, tile = 128, 2880, 2880, 128
    stride = -(-rows // tile) * tile
    numel = experts * stride * columns
    assert numel / (experts * rows * columns) == pytest.approx(1.022, abs=0.001)
    p = plan([Request("down", numel, tile * columns), Request("b", 9)], 64, align=8)
    assert all(cut % tile == 0 for cut in expert_rows_at_boundaries(p, 0, stride, columns))


@pytest.mark.parametrize("world_size", [64, 256])
def test_no_tile_of_a_real_layer_is_cut_in_lanes(world_size):
    for model in ("gpt-oss-120b", "qwen3-30b-a3b-unfused"):
        layer = next(unit for unit in shipped_units(model) if unit.name == "layer")
        p = plan_lanes(requests(layer, 128), world_size, align=8, lanes=3)
        validate_plan(p)
        assert len(p.lanes) == 3
        for index, request in enumerate(p.requests):
            sizes = [size for size in p.shard_sizes(index) if size]
            assert sum(sizes) == request.numel
            assert all(size % request.block == 0 for size in sizes[:-1])
