# SPDX-License-Identifier: Apache-2.0
"""What backward is done with, and what it may come to, from the order of forwards alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vescale.fsdp.forward_record import ForwardRecord


def chain(*units, **options):
    record = ForwardRecord(units[-1], **options)
    for at, unit in enumerate(units):
        record.add(unit, at, needed=True)
    return record


def test_modules_of_one_unit_in_a_row_have_one_place():
    record = ForwardRecord(0)
    assert [record.add(u, 0, needed=True) for u in (3, 3, 4, 3)] == [0, 0, 1, 2]
    assert record.holds(3)
    assert not record.holds(0)


def test_backward_is_done_with_what_began_later():
    record = ForwardRecord(0)
    for unit, began in ((1, 0), (2, 1), (9, 0), (3, 3), (0, 0)):  # 9 holds 1 and 2, and 0 all
        record.add(unit, began, needed=True)
    record.walk()
    assert record.over(3) == []
    assert record.over(2) == [3]
    assert record.over(1) == [3]
    assert record.over(0) == [3, 1]
    assert record.over(-1) == [4, 3, 2, 1, 0]


def test_a_unit_that_ran_twice_is_awaited_until_both_places_are_done():
    record = chain(1, 2, 1, 0)
    record.walk()
    assert record.next_place(1) == 2
    record.finish(2)
    assert record.awaits(1)
    assert record.finish(0)
    assert not record.finish(0)
    assert not record.awaits(1)


def test_a_forward_is_awaited_until_a_backward_has_walked_it():
    record = chain(1, 0, replicated=frozenset({1, 7}))
    assert record.absent == {7}
    assert record.awaits(1)
    assert record.awaits(7)
    record.walk()
    assert not record.awaits(7)
    record.leave()
    assert not record.awaits(1)
    record.add(5, 2, needed=True)  # a forward that goes on after a backward inside of it
    assert record.awaits(5)


def test_places_are_ahead_until_backward_has_come_to_them():
    record = chain(1, 2, 0)
    assert record.is_ahead(2)
    record.walk()
    record.cursor = 1
    assert [record.is_ahead(at) for at in range(3)] == [True, False, False]


def test_backward_starts_where_it_is_needed_first():
    record = ForwardRecord(0)
    record.add(1, 0, needed=False)
    assert record.first == -1
    record.add(2, 1, needed=True)
    assert record.first == 1


@st.composite
def forwards(draw):
    """Return units and begins by place, of calls nested at random."""
    units, began = [], []

    def call(depth):
        start = len(units)
        for _ in range(draw(st.integers(0, 3)) if depth < 3 else 0):
            call(depth + 1)
        units.append(len(units))
        began.append(start)

    call(0)
    return units, began


@settings(deadline=None, max_examples=50)
@given(forwards(), st.data())
def test_every_place_is_done_once_whatever_backward_comes_to(forward, data):
    units, began = forward
    record = ForwardRecord(units[-1])
    for unit, begin in zip(units, began, strict=True):
        record.add(unit, begin, needed=True)
    record.walk()
    path = sorted(data.draw(st.sets(st.sampled_from(units))), reverse=True)
    seen = []
    for place in [*path, -1]:
        seen += [at for at in record.over(place) if record.finish(at)]
        assert all(began[at] > place for at in seen)
    assert sorted(seen) == units
