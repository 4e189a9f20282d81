# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vescale.dtensor.random import mt19937


def generator(drawn):
    g = torch.Generator().manual_seed(4)
    torch.empty(drawn).uniform_(generator=g)
    return g


@pytest.mark.parametrize("drawn", [0, 3, 623, 624, 625, 1000])
@pytest.mark.parametrize("words", [*range(0, 1301, 13), 623, 624, 625, 100_003])
def test_seeking_is_drawing(drawn, words):
    sought, drew = generator(drawn), generator(drawn)
    mt19937.seek(sought, words)
    torch.empty(words).uniform_(generator=drew)
    assert torch.equal(sought.get_state(), drew.get_state())


@pytest.mark.parametrize("words", [1_000_003, 5_000_011, 100_000_000])
def test_a_jump_is_drawing(words):
    sought, drew = generator(17), generator(17)
    mt19937.seek(sought, words)
    for first in range(0, words, 1_000_000):  # a bounded buffer
        torch.empty(min(1_000_000, words - first)).uniform_(generator=drew)
    assert torch.equal(sought.get_state(), drew.get_state())


def test_jumps_add_up():
    """So far that nobody draws it."""
    once, twice = generator(5), generator(5)
    mt19937.seek(once, 3 * 10**11 + 7)
    mt19937.seek(twice, 10**11)
    mt19937.seek(twice, 2 * 10**11 + 7)
    assert torch.equal(once.get_state(), twice.get_state())


def test_a_distance_that_was_sought_pays_earlier():
    words = 7_000_000
    mt19937.seek(generator(0), words)
    assert mt19937.pays(words)
    assert not mt19937.pays(100_000)
    assert mt19937.pays(mt19937.COLD_WORDS)


def test_another_generator_is_refused():
    class Other:
        def get_state(self):
            return torch.zeros(16, dtype=torch.uint8)

    with pytest.raises(NotImplementedError, match="is not that of torch's CPU generator"):
        mt19937.seek(Other(), 3)
