# SPDX-License-Identifier: Apache-2.0
"""Few cases that together have every pair of values of any two factors."""

import itertools
from collections.abc import Callable, Sequence


def pairwise(factors: Sequence[Sequence], valid: Callable[..., bool] = lambda *_: True) -> list:
    """Return cases, one value per factor, such that each pair that some valid case has is in one.

    Greedy: the next case is the valid one with most pairs that none has yet. Deterministic.
    """
    cases = [case for case in itertools.product(*factors) if valid(*case)]
    pairs = {case: _pairs(case) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def _pairs(case: tuple) -> set:
    return set(itertools.combinations(enumerate(case), 2))
