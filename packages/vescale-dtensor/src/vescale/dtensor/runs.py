# SPDX-License-Identifier: Apache-2.0
"""One integer per rank, run-length encoded: ``((value, ranks), ...)``.

A tensor cut into equal parts over 10,240 ranks is a few runs, and there may be a thousand such
tensors. Encoded runs are canonical (no run is empty, no two neighbours have one value), so equal
integers are equal runs.
"""

import functools
import itertools
from collections.abc import Iterable

Runs = tuple[tuple[int, int], ...]

_SHORT = 16  # integers that are written out one by one


def encode(values: Iterable[int]) -> Runs:
    """Return ``values`` as runs."""
    return tuple((value, len(list(run))) for value, run in itertools.groupby(values))


def canonical(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return ``runs`` without empty ones, and with neighbours of one value joined."""
    kept = [run for run in runs if run[1]]
    if all(one[0] != other[0] for one, other in itertools.pairwise(kept)):
        return tuple(kept)
    groups = itertools.groupby(kept, key=lambda run: run[0])
    return tuple((value, sum(ranks for _, ranks in run)) for value, run in groups)


@functools.lru_cache(maxsize=4)  # few: each may be long
def expand(runs: Runs) -> tuple[int, ...]:
    """Return one integer per rank; linear in the number of ranks."""
    return tuple(
        itertools.chain.from_iterable(itertools.repeat(value, ranks) for value, ranks in runs)
    )


def length(runs: Runs) -> int:
    """Return the number of ranks."""
    return sum(ranks for _, ranks in runs)


def total(runs: Runs) -> int:
    """Return the sum over ranks."""
    return sum(value * ranks for value, ranks in runs)


def locate(runs: Runs, rank: int) -> tuple[int, int]:
    """Return the sum over the ranks before ``rank``, which is in range, and its own value."""
    before = first = 0
    for value, ranks in runs:
        if rank < first + ranks:
            return before + (rank - first) * value, value
        before, first = before + ranks * value, first + ranks
    raise IndexError(f"rank {rank} is not in [0, {first}).")


def text(runs: Runs) -> str:
    """Return the expanded integers as a Python expression, short for long runs."""
    ranks = length(runs)
    if ranks <= _SHORT or 4 * len(runs) > ranks:
        return str(expand(runs))
    return " + ".join(f"({value},) * {ranks}" for value, ranks in runs)
