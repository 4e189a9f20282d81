# SPDX-License-Identifier: Apache-2.0
import itertools

from testing.pairwise import pairwise


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_every_pair_of_a_valid_case_is_there():
    factors = [range(4), "abc", (True, False), "xyz"]

    def valid(number, letter, flag, _):
        return flag or (number, letter) != (0, "a")

    every = [case for case in itertools.product(*factors) if valid(*case)]
    chosen = pairwise(factors, valid)
    assert all(valid(*case) for case in chosen)
    assert pairs(chosen) == pairs(every)
    assert len(chosen) <= 16 < len(every)
