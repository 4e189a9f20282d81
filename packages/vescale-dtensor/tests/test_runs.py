# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale.dtensor.runs import canonical, encode, expand, length, locate, text, total

values = st.lists(st.integers(-1, 2), max_size=40)
pairs = st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 4)), max_size=12)


@given(values)
def test_runs_give_the_integers_back(values):
    runs = encode(values)
    assert expand(runs) == tuple(values)
    assert length(runs) == len(values)
    assert total(runs) == sum(values)
    assert eval(text(runs)) == tuple(values)
    for rank, value in enumerate(values):
        assert locate(runs, rank) == (sum(values[:rank]), value)


@given(pairs)
def test_equal_integers_are_equal_runs(pairs):
    runs = canonical(pairs)
    assert runs == encode(expand(tuple(pairs)))
    assert canonical(runs) == runs


def test_a_rank_beyond_the_last_is_an_error():
    with pytest.raises(IndexError, match=r"rank 3 .*\[0, 3\)"):
        locate(((1, 2), (0, 1)), 3)


def test_text_is_short_for_long_runs():
    assert text(((1, 3),)) == "(1, 1, 1)"
    assert text(((1, 300), (0, 5))) == "(1,) * 300 + (0,) * 5"
