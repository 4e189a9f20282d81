# SPDX-License-Identifier: Apache-2.0
"""Slots do not overlap, buckets close when full, and each divides by the ranks."""

from hypothesis import given
from hypothesis import strategies as st

from vescale.legacy.ddp.layout import Slot, lay_out


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=12),
    st.none() | st.integers(1, 30),
    st.integers(1, 5),
)
def test_slots_and_buckets(numels, bucket_numel, divisor):
    layout = lay_out(numels, bucket_numel, divisor)
    end = 0
    for numel, slot in zip(reversed(numels), reversed(layout.slots), strict=True):
        assert slot.end - slot.start == numel
        first, last = layout.buckets[slot.bucket]
        assert max(end, first) == slot.start <= slot.end <= last
        end = slot.end
    edges = [edge for bucket in layout.buckets for edge in bucket]
    assert edges[0] == 0
    assert edges[-1] == layout.numel
    assert edges[1:-1:2] == edges[2::2]
    assert all((last - first) % divisor == 0 for first, last in layout.buckets)
    assert bucket_numel is not None or len(layout.buckets) == 1


def test_the_last_parameter_is_first():
    layout = lay_out([8, 4, 3], 6, 2)
    assert layout.slots == (Slot(8, 16, 1), Slot(3, 7, 0), Slot(0, 3, 0))
    assert layout.buckets == ((0, 8), (8, 16))


def test_parameters_without_elements_open_no_bucket():
    layout = lay_out([0, 3, 0], 2, 2)
    assert layout.slots == (Slot(3, 3, 0), Slot(0, 3, 0), Slot(0, 0, 0))
    assert layout.buckets == ((0, 4),)
