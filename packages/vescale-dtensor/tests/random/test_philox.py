# SPDX-License-Identifier: Apache-2.0
"""The emulation of a GPU's draws, against published numbers and a literal reading of the loops."""

import numpy as np
import pytest

from vescale.dtensor.random.philox import (
    THREADS_OF_BLOCK,
    Draws,
    bernoulli,
    dropout_vector,
    normal,
    philox,
    thread_limit,
    uniform,
    units,
)

H100 = thread_limit(132, 2048)
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers of Random123
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert tuple(philox(*counter, *key).tolist()) == expected


def test_published_prints_of_seed_0():
    first = Draws(12, 0, 0, H100)
    assert first.advance == 4
    got = uniform(first, np.arange(12), 0.0, 1.0).round(4)
    assert got[:4].tolist() == np.float32([0.3990, 0.5167, 0.0249, 0.9401]).tolist()
    second = uniform(Draws(9, 0, first.advance, H100), np.arange(9), 0.0, 1.0).round(4)
    assert second[:2].tolist() == np.float32([0.9722, 0.7910]).tolist()
    got = normal(Draws(24, 0, 0, H100), np.arange(24), 0.0, 1.0).round(4)
    assert got[:4].tolist() == np.float32([-0.9247, -0.4253, -2.6438, 0.1452]).tolist()


def literal(draws):
    """Every thread's loop, as a kernel runs it: words [numel]."""
    out = np.zeros(draws.numel, np.uint32)
    threads, unroll = draws.threads, draws.unroll
    rounded = ((draws.numel - 1) // (threads * unroll) + 1) * threads * unroll
    for thread in range(threads):
        for call, start in enumerate(range(thread, rounded, threads * unroll)):
            counter = draws.offset // 4 + call
            words = philox(counter & ONES, counter >> 32, thread, 0, draws.seed & ONES, 0)
            for lane in range(unroll):
                if start + lane * threads < draws.numel:
                    out[start + lane * threads] = words[lane]
    return out


def literal_dropout(draws):
    out = np.zeros(draws.numel, np.uint32)
    for thread in range(draws.threads):
        call = 0
        step = draws.threads * draws.vector
        for start in range(thread * draws.vector, draws.numel, step):
            for first in range(0, draws.vector, 4):
                counter = draws.offset // 4 + call
                words = philox(counter & ONES, counter >> 32, thread, 0, draws.seed & ONES, 0)
                call += 1
                for lane in range(min(4, draws.vector)):
                    out[start + first + lane] = words[lane]
    return out


@pytest.mark.parametrize("offset", [0, 8, 2**34 - 4])
@pytest.mark.parametrize("numel", [1, 255, 1000, 1024, 1025, 2 * 512 * 4 + 3])
def test_the_closed_form_is_the_loop(numel, offset):
    draws = Draws(numel, 7, offset, thread_limit(1, 512))
    words, lane = draws.words(np.arange(numel))
    assert np.array_equal(words[np.arange(numel), lane], literal(draws))


@pytest.mark.parametrize(("numel", "itemsize"), [(4096, 4), (4096, 2), (1002, 4), (8192, 2)])
def test_the_closed_form_of_fused_dropout_is_the_loop(numel, itemsize):
    vector = dropout_vector(numel, itemsize)
    assert vector > 1
    draws = Draws(numel, 7, 4, thread_limit(1, 512), vector)
    words, lane = draws.words(np.arange(numel))
    assert np.array_equal(words[np.arange(numel), lane], literal_dropout(draws))


def test_the_generator_advances_as_one_device_lets_it():
    assert Draws(3072, 0, 0, H100).advance == 4  # torch's DTensor: 3072
    assert Draws(4 * H100 + 1, 0, 0, H100).advance == 8
    assert Draws(2 * H100 + 1, 0, 0, H100, double=True).advance == 8
    assert Draws(0, 0, 0, H100).advance == 0
    assert dropout_vector(1001, 2) == 1
    assert THREADS_OF_BLOCK * 1056 == H100 == 270336


def test_numbers_are_in_their_range():
    for double in (False, True):
        draws = Draws(100_000, 3, 0, H100, double=double)
        u = units(draws, np.arange(100_000))
        assert 0 < u.min() < u.max() <= 1
        assert abs(u.mean() - 0.5) < 0.01
        assert abs(bernoulli(draws, np.arange(100_000), 0.3).mean() - 0.3) < 0.01
    assert abs(normal(Draws(100_000, 3, 0, H100), np.arange(100_000), 2.0, 3.0).std() - 3) < 0.05
