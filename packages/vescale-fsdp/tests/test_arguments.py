# SPDX-License-Identifier: Apache-2.0
import pytest

from vescale.fsdp.arguments import check_bool, check_reshard, reshard_over


@pytest.mark.parametrize(
    ("value", "shards", "expected"),
    [
        (None, 4, None),
        (True, 1, True),
        (False, 4, False),
        (2, 4, 2),
        (4, 4, True),
        (3, 12, 3),
    ],
)
def test_a_number_of_ranks_is_one_that_no_bool_stands_for(value, shards, expected):
    assert reshard_over(value, shards) is expected


def test_one_rank_keeps_everything_and_says_so():
    with pytest.warns(UserWarning, match="keeps the full parameters, as False does"):
        check_reshard(1)
    assert reshard_over(1, 4) is False
    assert reshard_over(1, 1) is False


@pytest.mark.parametrize("value", [0, -2, 3, 8])
def test_a_number_that_does_not_divide_the_ranks_is_refused(value):
    with pytest.raises(ValueError, match=rf"={value} is no divisor of the 4 ranks"):
        reshard_over(value, 4)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match=r"reshard_after_forward=2\.0 is a float"):
        check_reshard(2.0)
    with pytest.raises(TypeError, match="recurse=1 is a int"):
        check_bool("recurse", 1)
