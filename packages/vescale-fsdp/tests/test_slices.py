# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale.fsdp.lanes import plan_lanes
from vescale.fsdp.planner import Request, plan
from vescale.fsdp.slices import Piece, Slices

tensors = st.tuples(st.integers(0, 40), st.integers(1, 12))
requests_of = st.lists(tensors, min_size=1, max_size=6).map(
    lambda sizes: [Request(f"t{i}", *size) for i, size in enumerate(sizes)]
)


def elements(piece):
    return [
        piece.start + row * piece.stride + column
        for row in range(piece.rows)
        for column in range(piece.numel)
    ]


@given(
    requests=requests_of,
    world_size=st.integers(1, 7),
    align=st.integers(1, 4),
    lanes=st.integers(1, 3),
    tail=st.integers(0, 5),
)
def test_every_element_of_the_full_buffer_has_one_use(requests, world_size, align, lanes, tail):
    """Tensors, padding and tails cover the full buffer, and each rank's part is where its shard's
    elements are gathered to."""
    p = plan_lanes(requests, world_size, align=align, lanes=lanes)
    slices = Slices(p, tail if p.shard_numel else 0)
    used = {}
    for index, request in enumerate(p.requests):
        found = [
            e for piece in slices.pieces(p.offsets[index], request.numel) for e in elements(piece)
        ]
        assert len(found) == request.numel
        assert len(slices.pieces(p.offsets[index], request.numel)) <= 3
        used |= {e: (index, i) for i, e in enumerate(found)}
    assert len(used) == p.numel
    padding = [e for gap in slices.gaps() for piece in slices.pieces(*gap) for e in elements(piece)]
    assert len(padding) == p.padding_numel
    assert used.keys().isdisjoint(padding)
    assert len(used) + len(padding) + world_size * slices.tail == slices.full_numel
    for rank in range(world_size):
        # where each element of the rank's shard lies in the full buffer
        place = {}
        for (shard_start, numel, _, _), (start, length) in zip(
            slices.lanes, slices.slots(rank), strict=True
        ):
            assert numel == length
            place |= {shard_start + i: start + i for i in range(numel)}
        assert sorted(place) == list(range(slices.shard_numel))
        sizes, at = slices.cuts(rank)
        assert sum(sizes) == slices.shard_numel
        for index in range(len(requests)):
            begin, start, numel = p.local_range(index, rank)
            assert sizes[at[index]] == numel
            assert not numel or sum(sizes[: at[index]]) == start
            for i in range(numel):
                assert used[place[start + i]] == (index, begin + i)
        tail_places = [place[p.shard_numel + i] for i in range(slices.tail)]
        assert used.keys().isdisjoint(tail_places)


def test_a_tail_follows_the_last_lane_only():
    requests = [Request("long", 21, 7), Request("short", 8, 2)]
    p = plan_lanes(requests, 2, align=1, lanes=2)
    (first, second) = p.lanes
    slices = Slices(p, 3)
    assert slices.lanes[0] == (0, first.shard_numel, 0, 2 * first.shard_numel)
    assert slices.lanes[1][1] == second.shard_numel + 3
    for index, request in enumerate(requests):
        (piece,) = slices.pieces(p.offsets[index], request.numel)
        lane, _ = p.places[index]
        assert bool(piece.stride) == bool(lane), "cut at the boundary only behind a tail"


def test_without_a_tail_a_tensor_is_one_piece():
    p = plan([Request("a", 12, 4), Request("b", 5)], 3)
    assert Slices(p).pieces(p.offsets[0], 12) == [Piece(p.offsets[0], 12)]
    assert Slices(p).pieces(0, 0) == []


@pytest.mark.parametrize("tail", [0, 4])
def test_nothing_to_lay_out(tail):
    p = plan([Request("empty", 0)], 4, align=8)
    assert Slices(p, 0).full_numel == 0
    assert Slices(p, 0).gaps() == []
    assert Slices(p, tail).slots(2)[0][1] == tail
