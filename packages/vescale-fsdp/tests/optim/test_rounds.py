# SPDX-License-Identifier: Apache-2.0
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testing.matrices import DSV3, LLAMA_8B, LLAMA_70B, cut_evenly
from vescale.fsdp.optim.exchange import away_side, home_side, share_sides
from vescale.fsdp.optim.roots import Matrix, Piece, plan_roots
from vescale.fsdp.optim.rounds import fill_rounds, makespan, plan_rounds


@st.composite
def plans(draw):
    world_size = draw(st.integers(1, 4))
    matrices = []
    for _ in range(draw(st.integers(0, 9))):
        numels = draw(st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size))
        starts = [0, *itertools.accumulate(numels)]
        pieces = [Piece(rank, starts[rank], numel) for rank, numel in enumerate(numels) if numel]
        if pieces:
            matrices.append(Matrix(1, sum(numels), tuple(pieces)))
    return plan_roots(matrices, world_size, draw(st.integers(1, 2)))


def buffer_nbytes(plan, indices, rank, itemsize):
    """Return what one rank needs in a round, from the layouts that it really uses."""
    replica, local = divmod(rank, plan.world_size)
    here = [i for i in indices if plan.home(i)[0] == replica]
    sides = [away_side(plan, here, local), home_side(plan, here, local)]
    if plan.replicas > 1:
        sides += share_sides(plan, indices, local)
    return itemsize * sum(side.numel for side in sides)


@given(plans(), st.integers(1, 300))
def test_rounds_have_what_must_travel_once_within_the_limit(plan, limit):
    rounds = plan_rounds(plan, 2, limit)
    travels = [i for i, m in enumerate(plan.matrices) if plan.replicas > 1 or m.holder is None]
    assert sorted(itertools.chain(*rounds)) == travels
    for indices in rounds:
        jobs = max(Counter(plan.roots[i] for i in indices).values())
        ranks = range(plan.replicas * plan.world_size)
        assert jobs == 1 or max(buffer_nbytes(plan, indices, r, 2) for r in ranks) <= limit
    assert len(plan_rounds(plan, 2, 1 << 40)) <= 1


@given(plans())
def test_early_rounds_have_the_large_matrices(plan):
    rounds = plan_rounds(plan, 2, 1)
    for one, later in itertools.pairwise(rounds):
        last = {plan.roots[i]: plan.matrices[i].cost for i in one}
        assert all(plan.matrices[i].cost <= last[plan.roots[i]] for i in later)


@given(plans(), st.integers(1, 300))
def test_every_matrix_is_solved_once_by_its_root(plan, limit):
    rounds = plan_rounds(plan, 2, limit)
    fills = fill_rounds(plan, rounds)
    assert len(fills) == max(len(rounds), 1)
    kept = [(i, root) for fill in fills for root, mine in fill.items() for i in mine]
    assert all(plan.roots[index] == root for index, root in kept)
    solved = [index for index, _ in kept] + list(itertools.chain(*rounds))
    assert sorted(solved) == list(range(len(plan.matrices)))
    assert makespan(plan, rounds) >= plan.imbalance - 1e-9 or not plan.matrices


# B2: rounds one after the other, each as long as its busiest rank, against perfect balance.
@pytest.mark.parametrize(
    ("model", "world_size", "largest"),
    [
        (LLAMA_8B, 64, 1.06),
        (LLAMA_70B, 64, 1.19),
        (LLAMA_70B, 128, 1.20),
        (DSV3, 64, 1.01),
        (DSV3, 256, 1.05),
    ],
)
def test_rounds_of_real_models_take_little_longer_than_perfect_balance(model, world_size, largest):
    plan = plan_roots(cut_evenly(model, world_size), world_size)
    rounds = plan_rounds(plan, 2, (1 << 30) * 2 // 3)
    assert makespan(plan, rounds) <= largest
