# SPDX-License-Identifier: Apache-2.0
import pytest
from benchmarks.planner import requests
from hypothesis import given
from hypothesis import strategies as st

from vescale.fsdp.lanes import plan_lanes
from vescale.fsdp.padding_cause import padding_causes
from vescale.fsdp.planner import Request, plan
from vescale.fsdp.simulate.shapes import shipped_units

requests_lists = st.lists(
    st.builds(Request, st.just("w"), st.integers(0, 60), st.integers(1, 70)), max_size=6
)


def test_a_huge_block_is_named_with_the_padding_it_causes():
    p = plan([Request("small", 10), Request("huge", 90, 90), Request("none", 0)], 4)
    (cause,) = padding_causes(p)
    assert (p.shard_numel, p.padding_numel) == (90, 260)
    assert cause.fqns == ("huge",)
    assert (cause.numel, cause.block, cause.padding_numel, cause.padding) == (90, 90, 260, 2.6)


def test_tensors_alike_are_a_cause_together():
    p = plan([Request("gate", 90, 90), Request("bias", 6), Request("up", 90, 90)], 4)
    assert [cause.fqns for cause in padding_causes(p)] == [("gate", "up")]


@pytest.mark.parametrize("over", [0.0, 0.1, 3.0])
def test_little_padding_has_no_cause(over):
    assert padding_causes(plan([Request("a", 64, 8), Request("b", 64)], 4), over=over) == ()
    p = plan([Request("small", 10), Request("huge", 90, 90)], 4)
    assert bool(padding_causes(p, over=over)) == (over < 2.6)


def test_padding_of_alignment_alone_has_no_cause():
    p = plan([Request("scale", 3, 2)], 16, align=8)
    assert p.padding > 0.1
    assert padding_causes(p) == ()


def test_each_lane_has_its_own_cause():
    p = plan_lanes([Request("a", 90, 90), Request("b", 41, 41), Request("c", 8)], 4, lanes=3)
    named = {fqn for cause in padding_causes(p) for fqn in cause.fqns}
    assert named == {"a", "b"}


def test_the_matrix_of_a_real_layer_that_no_planner_can_help_is_named():
    layer = next(unit for unit in shipped_units("llama3-70b") if unit.name == "layer")
    p = plan(requests(layer, 32), 1024, align=8)
    assert p.padding > 1
    (cause,) = padding_causes(p)
    assert cause.fqns == ("mlp.down_proj.weight",)
    assert cause.block == 32 * 28672


@given(requests_lists, st.integers(1, 9), st.sampled_from(["auto", 1, 2]))
def test_causes_are_over_the_limit_and_of_the_plan(tensors, world_size, lanes):
    p = plan_lanes(tensors, world_size, lanes=lanes, lane_nbytes=0)
    causes = padding_causes(p)
    assert len(causes) <= len(p.lanes)
    for cause in causes:
        assert cause.padding == cause.padding_numel / p.numel > 0.1
        assert cause.padding_numel <= p.padding_numel
        assert set(cause.fqns) <= {tensor.fqn for tensor in tensors}
