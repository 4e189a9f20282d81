# SPDX-License-Identifier: Apache-2.0
import itertools

from hypothesis import given
from hypothesis import strategies as st

from vescale.fsdp.optim.exchange import away_side, home_side, share_sides
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
    return plan_roots(matrices, world_size, draw(st.integers(1, 3)))


def sides_of(plan, replica):
    """Return (away, home) of every rank of a replica."""
    here = [i for i in range(len(plan.matrices)) if plan.home(i)[0] == replica]
    return [
        [side(plan, here, rank) for rank in range(plan.world_size)]
        for side in (away_side, home_side)
    ]


def split(side, peer):
    """Return (matrix, start, numel, place) of what is exchanged with ``peer``."""
    begin = sum(side.splits[:peer])
    end = begin + side.splits[peer]
    return [(s.matrix, s.start, s.numel, s.at - begin) for s in side.slots if begin <= s.at < end]


@given(plans())
def test_both_ends_of_a_pair_agree(plan):
    ranks, moved = range(plan.world_size), 0
    for replica in range(plan.replicas):
        away, home = sides_of(plan, replica)
        for holder, root in itertools.product(ranks, ranks):
            assert away[holder].splits[root] == home[root].splits[holder]
            assert split(away[holder], root) == split(home[root], holder)
        assert all(away[rank].splits[rank] == 0 for rank in ranks)
        moved += sum(side.numel for side in away)
    assert moved == plan.moved_numel


@given(plans())
def test_pieces_fill_each_buffer_exactly(plan):
    for replica in range(plan.replicas):
        for side in itertools.chain(*sides_of(plan, replica)):
            used = [at for slot in side.slots for at in range(slot.at, slot.at + slot.numel)]
            assert used == list(range(side.numel))


@given(plans())
def test_every_piece_reaches_its_root(plan):
    for index, matrix in enumerate(plan.matrices):
        replica, root = plan.home(index)
        home = sides_of(plan, replica)[1][root]
        arrived = {s.start: s.numel for s in home.slots if s.matrix == index}
        kept = {p.start: p.numel for p in matrix.pieces if p.rank == root}
        assert arrived | kept == {p.start: p.numel for p in matrix.pieces}


@given(plans())
def test_replicas_share_every_piece_once(plan):
    indices = range(len(plan.matrices))
    for rank in range(plan.world_size):
        sides = share_sides(plan, indices, rank)
        shared = [(slot.matrix, slot.start) for side in sides for slot in side.slots]
        held = [
            (index, p.start)
            for index, matrix in enumerate(plan.matrices)
            for p in matrix.pieces
            if p.rank == rank
        ]
        assert sorted(shared) == held
        for replica, side in enumerate(sides):
            assert all(plan.home(slot.matrix)[0] == replica for slot in side.slots)
