# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vescale.fsdp.planner
from vescale.fsdp.planner import Plan, Request, plan, validate_plan

requests_lists = st.lists(
    st.builds(Request, st.just("w"), st.integers(0, 60), st.integers(1, 70)), max_size=8
)


def round_trip(p):
    """Write distinct values into the buffer, cut it into shards, and read every tensor back."""
    values = [[(i, k) for k in range(request.numel)] for i, request in enumerate(p.requests)]
    buffer = [None] * p.buffer_numel
    for content, offset in zip(values, p.offsets, strict=True):
        buffer[offset : offset + len(content)] = content
    shards = [buffer[r * p.shard_numel : (r + 1) * p.shard_numel] for r in range(p.world_size)]
    gathered = [value for shard in shards for value in shard]
    for i, request in enumerate(p.requests):
        offset = p.offsets[i]
        assert gathered[offset : offset + request.numel] == values[i]
        pieces = []
        for rank, shard in enumerate(shards):
            begin, start, numel = p.local_range(i, rank)
            assert shard[start : start + numel] == values[i][begin : begin + numel]
            assert begin == len(pieces) if numel else True
            pieces += shard[start : start + numel]
        assert pieces == values[i]
        assert p.shard_sizes(i) == tuple(p.local_range(i, r)[2] for r in range(p.world_size))
        assert len(p.shard_runs(i)) <= 5


@given(requests_lists, st.integers(1, 12), st.sampled_from([1, 2, 3, 8]))
def test_every_plan_is_valid_and_gives_the_tensors_back(requests, world_size, align):
    p = plan(requests, world_size, align=align)
    validate_plan(p)
    round_trip(p)
    for i, request in enumerate(requests):
        held = [size for size in p.shard_sizes(i) if size]
        assert all(size % min(request.block, request.numel) == 0 for size in held[:-1])
    assert p.numel + p.padding_numel == p.buffer_numel == world_size * p.shard_numel
    assert p.padding == (p.padding_numel / p.numel if p.numel else 0.0)


@pytest.mark.parametrize(
    ("sizes", "world_size", "align", "shard_numel"),
    [
        pytest.param([(7, 2), (1, 1)], 2, 1, 4, id="last block short"),
        pytest.param([(3, 100)], 4, 1, 3, id="block over the tensor: atomic"),
        pytest.param([(8, 4), (2, 1)], 5, 1, 4, id="fewer blocks than ranks"),
        pytest.param([(0, 4), (6, 3), (0, 1)], 2, 1, 3, id="zero-size tensors"),
        pytest.param([(1, 1)], 4, 1, 1, id="scalar"),
        pytest.param([(13, 1)], 4, 1, 4, id="1-D tensor"),
        pytest.param([(5, 1), (3, 1)], 4, 8, 8, id="less than one alignment per rank"),
        pytest.param([(3, 2)], 16, 8, 8, id="trailing ranks all padding"),
        pytest.param([(0, 1), (0, 5)], 4, 8, 0, id="only zero-size tensors"),
        pytest.param([], 4, 8, 0, id="no tensor"),
        pytest.param([(10, 4), (7, 7)], 1, 8, 24, id="one rank: no boundary"),
        pytest.param([(24, 8), (16, 8)], 5, 8, 8, id="alignment of 8 elements"),
        pytest.param([(90, 90), (5, 1), (5, 1)], 4, 1, 90, id="huge block sets the size"),
        pytest.param([(3 << 33, 1 << 20)], 6, 8, 1 << 32, id="sizes beyond 32 bits"),
        pytest.param([(6, 2)], 4, 1, 2, id="not monotone: 2 fits, 3 does not, 4 does"),
    ],
)
def test_edge_cases(sizes, world_size, align, shard_numel):
    p = plan([Request(f"w{i}", *size) for i, size in enumerate(sizes)], world_size, align=align)
    assert p.shard_numel == shard_numel
    if p.numel < 1000:
        round_trip(p)


def test_one_rank_keeps_the_order_of_the_input():
    p = plan([Request("a", 3), Request("b", 9, 3), Request("c", 4, 2)], 1, align=8)
    assert p == Plan(p.requests, (0, 3, 12), 16, 1, 8)


def test_an_empty_tensor_lies_nowhere():
    p = plan([Request("a", 4), Request("none", 0), Request("b", 4)], 2)
    assert p.offsets[1] == 0
    assert p.shard_sizes(1) == (0, 0)
    assert p.local_range(1, 1) == (0, 0, 0)


def test_sizes_start_aligned_when_they_are_rounded_up():
    # How a caller aligns every start to 4: round sizes up, and take blocks of a multiple of 4.
    p = plan([Request("a", 8, 8), Request("b", 12, 4), Request("c", 4, 4)], 3, align=4)
    assert all(offset % 4 == 0 for offset in p.offsets)


def test_equal_groups_are_searched_once(monkeypatch):
    calls = []
    search = vescale.fsdp.planner.search_layout
    monkeypatch.setattr(
        vescale.fsdp.planner, "search_layout", lambda *args: calls.append(args) or search(*args)
    )
    vescale.fsdp.planner._layout.cache_clear()
    plans = [plan([Request(f"{layer}.w", 99, 7), Request("b", 5)], 3) for layer in range(80)]
    assert len(calls) == 1
    assert {p.offsets for p in plans} == {plans[0].offsets}
    assert plans[7].requests[0].fqn == "7.w"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Request("w", -1), ValueError, "w: numel=-1"),
        (lambda: Request("w", 4, 0), ValueError, "w: block=0"),
        (lambda: Request("w", 4.0), TypeError, r"w: numel=4\.0"),
        (lambda: plan([Request("w", 4)], 0), ValueError, "world_size=0"),
        (lambda: plan([Request("w", 4)], "2"), TypeError, "world_size='2'"),
        (lambda: plan([Request("w", 4)], 2, align=0), ValueError, "align=0"),
        (lambda: plan([Request("w", 4)], 2).local_range(0, 2), IndexError, "rank=2"),
        (lambda: plan([Request("w", 4)], 2).local_range(0, -1), IndexError, "rank=-1"),
    ],
)
def test_a_caller_mistake_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


# Imports the planner alone: a package object with the folder as its path, and no __init__ run.
SCRIPT = """
import sys, types
for name in ("vescale", "vescale.fsdp"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1]]
from vescale.fsdp.planner import Request, plan
sizes = [(7168 * 31, 7168), (2048 * 77, 2048), (999, 1), (5000, 5000), (64 * 8 * 9, 64)] * 6
for world_size in (3, 8, 24, 60):
    p = plan([Request(f"w{i}", *size) for i, size in enumerate(sizes)], world_size, align=8)
    print(p.shard_numel, p.offsets)
assert "torch" not in sys.modules
"""


def test_processes_with_other_hash_seeds_plan_the_same_without_torch():
    folder = str(Path(vescale.fsdp.planner.__file__).parent)
    outputs = {
        subprocess.run(
            [sys.executable, "-I", "-c", SCRIPT, folder]
            if seed is None
            else [sys.executable, "-c", SCRIPT, folder],
            env=None if seed is None else {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (None, "0", "1", "12345")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("\n") == 4
