# SPDX-License-Identifier: Apache-2.0
import itertools

from hypothesis import given
from hypothesis import strategies as st

from vescale.fsdp.optim.exchange import away_side, home_side
from vescale.fsdp.optim.roots import Matrix, Piece, plan_roots


@st.composite
def plans(draw):
    world_size = draw(st.integers(1, 5))
    matrices = []
    for _ in range(draw(st.integers(0, 6))):
        numels = draw(st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size))
        starts = [0, *itertools.accumulate(numels)]
        pieces = [Piece(rank, starts[rank], numel) for rank, numel in enumerate(numels) if numel]
        if pieces:
            matrices.append(Matrix(1, sum(numels), tuple(pieces)))
    return plan_roots(matrices, world_size)


def split(side, peer):
    """Return (matrix, start, numel, place, flag's place) of what is exchanged with ``peer``."""
    begin = sum(side.splits[:peer])
    end = begin + side.splits[peer]
    return [
        (slot.matrix, slot.start, slot.numel, slot.at - begin, slot.flag - begin)
        for slot in side.slots
        if begin <= slot.at < end
    ]


@given(plans())
def test_both_ends_of_a_pair_agree(plan):
    ranks = range(plan.world_size)
    away, home = ([side(plan, rank) for rank in ranks] for side in (away_side, home_side))
    for holder, root in itertools.product(ranks, ranks):
        assert away[holder].splits[root] == home[root].splits[holder]
        assert split(away[holder], root) == split(home[root], holder)
    assert all(away[rank].splits[rank] == 0 for rank in ranks)
    assert sum(side.numel for side in away) == plan.moved_numel + plan.moved_pieces


@given(plans())
def test_pieces_and_flags_fill_each_buffer_exactly(plan):
    for rank, build in itertools.product(range(plan.world_size), (away_side, home_side)):
        side = build(plan, rank)
        used = [slot.flag for slot in side.slots]
        for slot in side.slots:
            used += range(slot.at, slot.at + slot.numel)
        assert sorted(used) == list(range(side.numel))


@given(plans())
def test_every_piece_reaches_its_root(plan):
    for index, (matrix, root) in enumerate(zip(plan.matrices, plan.roots, strict=True)):
        arrived = {s.start: s.numel for s in home_side(plan, root).slots if s.matrix == index}
        kept = {p.start: p.numel for p in matrix.pieces if p.rank == root}
        assert arrived | kept == {p.start: p.numel for p in matrix.pieces}
