# SPDX-License-Identifier: Apache-2.0
"""Placements in any form a user writes become one tuple, or an error that says why not."""

import pytest

from vescale.legacy.dtensor import (
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    normalize_placements,
)

R = Replicate()


def test_none_stays_none_or_replicates():
    assert normalize_placements(None, 2) is None
    assert normalize_placements(None, 2, none_as_replicate=True) == (R, R)


def test_short_ones_are_padded_with_a_warning():
    with pytest.warns(UserWarning, match="taken as Replicate"):
        assert normalize_placements([Shard(0)], 3) == (Shard(0), R, R)


def test_negative_dims_count_from_the_end_of_a_known_tensor():
    given = [Shard(-1), InterleavedShard(-2, 3), Partial()]
    assert normalize_placements(given, 3) == tuple(given)
    expected = (Shard(2), InterleavedShard(1, 3), Partial())
    assert normalize_placements(given, 3, tensor_ndim=3) == expected


@pytest.mark.parametrize(
    ("placements", "text"),
    [([R, R, R], "3 placements"), ([0], "no Placement"), (R, "a list"), ([Shard(2), R], "lacks")],
)
def test_what_cannot_be_meant_is_refused(placements, text):
    with pytest.raises(ValueError, match=text):
        normalize_placements(placements, 2, tensor_ndim=2)
