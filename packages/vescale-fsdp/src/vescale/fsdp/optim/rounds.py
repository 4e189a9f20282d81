# SPDX-License-Identifier: Apache-2.0
"""Cut a plan into rounds, so that one is on the wire while another is computed.

Pure Python over integers, alike on all ranks. Rounds go by matrices per rank, not by layer: in a
layer of seven matrices most ranks of a large group would have nothing to do.
"""

from collections.abc import Iterator

from vescale.fsdp.optim.roots import RootPlan

Round = tuple[int, ...]


def plan_rounds(plan: RootPlan, itemsize: int, max_nbytes: int) -> tuple[Round, ...]:
    """Return the matrices of each round, by index, as few rounds as ``max_nbytes`` allows.

    Round j has the j-th largest job of every rank, joined with the next ones while no rank's
    buffers exceed ``max_nbytes``; a single job may. Matrices that nobody needs to send are in no
    round.
    """
    rounds: list[tuple[int, ...]] = []
    current: list[int] = []
    used: dict[tuple[int, int], int] = {}
    for jobs in _job_ranks(plan):
        need = _buffers(plan, jobs)
        joined = {at: used.get(at, 0) + numel for at, numel in need.items()}
        if current and itemsize * max(joined.values()) > max_nbytes:
            rounds.append(tuple(sorted(current)))
            current, used, joined = [], {}, need
        current += jobs
        used |= joined
    if current:
        rounds.append(tuple(sorted(current)))
    return tuple(rounds)


def fill_rounds(plan: RootPlan, rounds: tuple[Round, ...]) -> list[dict[int, list[int]]]:
    """Return, for each round, the matrices that each root solves beside those of the round.

    These are the ones that need no exchange: they keep a rank busy while others solve larger
    matrices of the round. The last round has all that are left; with no rounds at all, one is
    returned that has everything.
    """
    left: dict[int, list[int]] = {}
    travel = {index for indices in rounds for index in indices}
    for index, matrix in enumerate(plan.matrices):
        if index not in travel and matrix.numel:
            left.setdefault(plan.roots[index], []).append(index)
    filled = []
    for loads in [_loads(plan, indices) for indices in rounds[:-1]]:
        longest = max(loads.values())
        extra: dict[int, list[int]] = {}
        for root, mine in left.items():
            load = loads.get(root, 0)
            while mine and load + plan.matrices[mine[-1]].cost <= longest:
                extra.setdefault(root, []).append(mine.pop())
                load += plan.matrices[extra[root][-1]].cost
        filled.append(extra)
    return [*filled, left]


def makespan(plan: RootPlan, rounds: tuple[Round, ...]) -> float:
    """Return the time of ``rounds`` one after the other, each as long as its busiest rank.

    Over that of a perfectly balanced step; FLOPs count, communication does not.
    """
    longest = 0
    for indices, extra in zip(rounds or ((),), fill_rounds(plan, rounds), strict=True):
        loads = _loads(plan, indices)
        for root, more in extra.items():
            loads[root] = loads.get(root, 0) + sum(plan.matrices[i].cost for i in more)
        longest += max(loads.values(), default=0)
    return longest * len(plan.loads) / max(sum(plan.loads), 1)


def _loads(plan: RootPlan, indices: Round) -> dict[int, int]:
    """Return the cost of some matrices on each root that has any."""
    loads: dict[int, int] = {}
    for index in indices:
        root = plan.roots[index]
        loads[root] = loads.get(root, 0) + plan.matrices[index].cost
    return loads


def _job_ranks(plan: RootPlan) -> Iterator[list[int]]:
    """Yield the largest job of every rank, then the second of each, and so on."""
    jobs: dict[int, list[int]] = {}
    order = sorted(range(len(plan.matrices)), key=lambda i: (-plan.matrices[i].cost, i))
    for index in order:
        if plan.replicas > 1 or plan.matrices[index].holder is None:
            jobs.setdefault(plan.roots[index], []).append(index)
    for place in range(max(map(len, jobs.values()), default=0)):
        yield [mine[place] for _, mine in sorted(jobs.items()) if place < len(mine)]


def _buffers(plan: RootPlan, indices: list[int]) -> dict[tuple[int, int], int]:
    """Return the elements of every rank's buffers, by (replica, rank), for some matrices."""
    numels: dict[tuple[int, int], int] = {}
    for index in indices:
        replica, root = plan.home(index)
        for piece in plan.matrices[index].pieces:
            places = [(r, piece.rank) for r in range(plan.replicas)] if plan.replicas > 1 else []
            if piece.rank != root:
                places += [(replica, piece.rank), (replica, root)]
            for place in places:
                numels[place] = numels.get(place, 0) + piece.numel
    return numels
