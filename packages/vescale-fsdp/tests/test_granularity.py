# SPDX-License-Identifier: Apache-2.0
import copy
import math
import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale.fsdp.granularity import (
    Block,
    Elements,
    Granularity,
    Rows,
    Whole,
    default_granularity,
    parse_granularity,
    resolve_granularity,
    unit_runs,
)
from vescale.fsdp.planner import Request, plan

SHAPE = (4, 6, 10)


def param(*shape):
    return SimpleNamespace(shape=shape)


@pytest.mark.parametrize(
    ("granularity", "shape", "dims", "block", "unit"),
    [
        (Elements(), SHAPE, (0, 1, 2), 1, 1),
        (Rows(), SHAPE, (0,), 60, 60),
        (Rows(3), SHAPE, (0,), 180, 60),
        (Block(1, 3), SHAPE, (0,), 180, 60),
        (Block(2, 3), SHAPE, (0, 1), 30, 10),
        (Block(3, 8), SHAPE, (0, 1, 2), 8, 1),
        (Whole(), SHAPE, (), 240, 240),
        (Elements(), (7,), (0,), 1, 1),
        (Rows(3), (7,), (0,), 3, 1),
        (Whole(), (7,), (), 7, 7),
        (Elements(), (), (), 1, 1),
        (Rows(4), (), (), 1, 1),
        (Block(2, 4), (), (), 1, 1),
        (Whole(), (), (), 1, 1),
        (Elements(), (0, 5), (0, 1), 1, 1),
        (Rows(2), (0, 5), (0,), 10, 5),
        (Rows(2), (5, 0), (0,), 2, 1),
        (Whole(), (5, 0), (), 1, 1),
    ],
)
def test_dims_block_and_unit_of_a_shape(granularity, shape, dims, block, unit):
    assert granularity.dims(shape) == dims
    assert granularity.block_numel(shape) == block
    assert granularity.unit_numel(shape) == unit


def test_granularities_are_values():
    values = [Elements(), Whole(), Rows(), Rows(2), Block(2, 2)]
    assert Rows(2) == Block(1, 2) == Block(dims=1, n=2)
    assert len({*values, Rows(1), Block(1, 1), Elements()}) == 5
    assert Rows(2) != (1, 2)
    for value in values:
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
        assert type(copy.copy(value)) is type(value)
        assert eval(repr(value)) == value
    with pytest.raises(AttributeError):
        Rows(2).n = 3


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Rows(0), ValueError, "Rows: n=0"),
        (lambda: Rows(True), TypeError, "Rows: n=True is no integer"),
        (lambda: Block(0, 4), ValueError, "Block: dims=0"),
        (lambda: Block(2, -1), ValueError, "Block: n=-1"),
        (lambda: Rows(1.5), TypeError, r"Rows: n=1\.5"),
        (lambda: Block("2", 1), TypeError, "Block: dims='2'"),
        (lambda: Block(3, 1).dims((4, 5), fqn="a.w"), ValueError, r"a\.w: .*at least 3 dims"),
        (lambda: Block(3, 1).block_numel((4, 5)), ValueError, r"^Block\(dims=3, n=1\)"),
        (lambda: Block(3, 1).unit_numel((4, 5), fqn="a.w"), ValueError, r"a\.w"),
        (lambda: Granularity().dims((1,)), NotImplementedError, "dims"),
        (lambda: Granularity().block_numel((1,)), NotImplementedError, "block_numel"),
    ],
)
def test_a_wrong_granularity_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_matrices_are_cut_between_rows_by_default_and_vectors_anywhere():
    assert default_granularity(()) == default_granularity((5,)) == Elements()
    assert default_granularity((5, 4)) == Rows(1)
    assert default_granularity((2, 5, 4)) == default_granularity((2, 5, 4, 3)) == Block(2, 1)


@pytest.mark.parametrize(
    ("granularity", "shape", "expected"),
    [
        (None, (5,), Elements()),
        (None, (5, 4), Rows(1)),
        (Rows(2), (5, 4), Rows(2)),
        (Rows(2), (5,), Elements()),
        (Rows(2), (), Elements()),
        (Block(2, 2), (5,), Elements()),
        (Whole(), (5,), Whole()),
        (Whole(), (), Whole()),
        (Elements(), (5, 4), Elements()),
        (lambda fqn, p: Rows(len(p.shape)), (5,), Rows(1)),
        (lambda fqn, p: Whole() if fqn == "a.w" else None, (5, 4), Whole()),
    ],
)
def test_one_argument_gives_each_parameter_its_granularity(granularity, shape, expected):
    assert resolve_granularity(granularity, "a.w", param(*shape)) == expected


@pytest.mark.parametrize(
    ("granularity", "error", "message"),
    [
        (lambda fqn, p: None, TypeError, r"a\.w: .*returned None"),
        (lambda fqn, p: 32, TypeError, r"a\.w: .*returned 32"),
        (lambda fqn, p: Rows, TypeError, r"a\.w: .*Rows"),
        (Rows, TypeError, r"a\.w: .*an instance"),
        (32, TypeError, r"a\.w: granularity=32"),
        ("rows:32", TypeError, r"a\.w: granularity='rows:32'"),
        (Block(3, 1), ValueError, r"a\.w: .*at least 3 dims"),
        (lambda fqn, p: Block(3, 1), ValueError, r"a\.w: .*at least 3 dims"),
    ],
)
def test_a_granularity_that_does_not_resolve_names_the_parameter(granularity, error, message):
    with pytest.raises(error, match=message):
        resolve_granularity(granularity, "a.w", param(5, 4))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("elements", Elements()),
        ("whole", Whole()),
        ("rows", Rows(1)),
        (" Rows:32 ", Rows(32)),
        ("block:2:64", Block(2, 64)),
    ],
)
def test_command_lines_name_a_granularity(text, expected):
    assert parse_granularity(text) == expected


@pytest.mark.parametrize(
    "text", ["", "row:2", "rows:", "rows:0", "rows:-2", "rows:2:3", "block:2", "elements:1", "2"]
)
def test_a_misspelt_granularity_lists_the_forms(text):
    with pytest.raises(ValueError, match=r"elements, rows, rows:N, block:DIMS:N, whole"):
        parse_granularity(text)


granularities = st.one_of(
    st.just(Elements()), st.just(Whole()), st.integers(1, 5).map(Rows),
    st.builds(Block, st.integers(1, 3), st.integers(1, 5)),
)  # fmt: skip


@given(st.lists(st.integers(0, 7), min_size=3, max_size=3), granularities, st.integers(1, 9))
def test_units_give_the_planned_ranges_back(shape, granularity, world_size):
    block, unit = granularity.block_numel(shape), granularity.unit_numel(shape)
    assert block % unit == 0
    p = plan([Request("a", 5), Request("w", math.prod(shape), block)], world_size)
    runs = unit_runs(p, 1, unit)
    units = [count for count, ranks in runs for _ in range(ranks)]
    assert len(runs) <= 5
    assert len(units) == world_size
    assert sum(units) > 0
    assert math.gcd(*units) == 1
    numel = math.prod(shape)
    assert numel // unit % sum(units) == 0  # rows are a multiple of the sum of units
    share = numel // sum(units)
    assert tuple(share * u for u in units) == p.shard_sizes(1)
    if isinstance(granularity, Whole):
        assert sum(u > 0 for u in units) == 1


def test_units_of_a_unit_that_was_not_planned_with():
    p = plan([Request("w", 12, 3)], 4)
    assert unit_runs(p, 0, 3) == ((1, 1), (1, 2), (1, 1))
    with pytest.raises(ValueError, match=r"w: unit_numel=2 .*\[3\]"):
        unit_runs(p, 0, 2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda param: Rows(2), r"<lambda>\(param\) .*too many positional"),
        (lambda fqn, param, mesh: Rows(2), r"<lambda>\(fqn, param, mesh\) .*missing .*'mesh'"),
        (lambda: Rows(2), r"<lambda>\(\) cannot be called with \(fqn, param\)"),
    ],
)
def test_a_function_of_other_arguments_says_which_are_expected(function, words):
    with pytest.raises(TypeError, match=rf"^w: the granularity function {words}.*lambda fqn, par"):
        resolve_granularity(function, "w", param(2, 2))


def test_what_a_function_raises_itself_is_raised():
    def fail(fqn, param):
        raise TypeError("a mistake inside")

    with pytest.raises(TypeError, match=r"^a mistake inside$"):
        resolve_granularity(fail, "w", param(2, 2))
    assert resolve_granularity(lambda *both: Rows(2), "w", param(2, 2)) == Rows(2)
