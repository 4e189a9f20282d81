# SPDX-License-Identifier: Apache-2.0
"""What torch's CUDA operators draw for any element, in numpy: Philox4x32-10 and its use.

An element's number depends on the seed, the offset of the generator, the number of elements and the
GPU's number of threads, and on its own index; never on its neighbours. Source of Philox: Salmon,
Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
W0, W1 = 0x9E3779B9, 0xBB67AE85
MASK, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
THREADS_OF_BLOCK = 256
TO_UNIT = np.float32(2.3283064e-10)  # 2**-32
TO_CIRCLE = np.float32(2.3283064e-10 * 6.2831855)


@dataclass(frozen=True)
class Draws:
    """One operator on a whole tensor of ``numel`` elements, on a CUDA device.

    ``most_threads`` is ``thread_limit()`` of the device; ``vector`` is 0, or for fused dropout the
    number of neighbours that one thread draws at once; ``double`` says that a number takes two
    words.
    """

    numel: int
    seed: int
    offset: int
    most_threads: int
    vector: int = 0
    double: bool = False

    @property
    def threads(self) -> int:
        blocks = -(-self.numel // THREADS_OF_BLOCK)
        return min(self.most_threads, THREADS_OF_BLOCK * blocks)

    @property
    def unroll(self) -> int:
        """How many numbers one call of the generator gives."""
        return 2 if self.double else 4

    @property
    def advance(self) -> int:
        """By how much the offset grows."""
        unroll = 4 if self.vector else self.unroll
        return ((self.numel - 1) // (self.threads * unroll) + 1) * 4 if self.numel else 0

    def place(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for elements ``index``, the thread, its call of the generator, and the lane."""
        index = np.asarray(index, np.int64)
        if self.vector > 1:
            group, inside = index // self.vector, index % self.vector
            calls = -(-self.vector // 4)
            call = group // self.threads * calls + inside // 4
            return group % self.threads, call, inside % 4
        turn = index // self.threads
        return index % self.threads, turn // self.unroll, turn % self.unroll

    def words(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the four words [len(index), 4] of the call, and the lane."""
        thread, call, lane = self.place(index)
        counter = np.uint64(self.offset // 4) + call.astype(np.uint64)
        thread = thread.astype(np.uint64)
        key = self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF
        return philox(counter & MASK, counter >> SHIFT, thread & MASK, thread >> SHIFT, *key), lane


def thread_limit(multiprocessors: int, threads_of_multiprocessor: int) -> int:
    """Return the most threads that torch starts for a random operator."""
    blocks = threads_of_multiprocessor // THREADS_OF_BLOCK
    return THREADS_OF_BLOCK * multiprocessors * blocks


def dropout_vector(numel: int, itemsize: int) -> int:
    """Return how many neighbours a thread of fused dropout takes, for aligned memory."""
    vector = 16 // itemsize
    while vector > 1 and numel % vector:
        vector //= 2
    return vector


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: int, k1: int) -> np.ndarray:
    """Return Philox4x32-10 of counters (c0, c1, c2, c3) under a key, as uint32 [..., 4]."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in np.broadcast_arrays(c0, c1, c2, c3))
    for _ in range(10):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1 = (p1 >> SHIFT) ^ c1 ^ np.uint64(k0), p1 & MASK
        c2, c3 = (p0 >> SHIFT) ^ c3 ^ np.uint64(k1), p0 & MASK
        k0, k1 = (k0 + W0) & 0xFFFFFFFF, (k1 + W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], -1).astype(np.uint32)


def units(draws: Draws, index: np.ndarray) -> np.ndarray:
    """Return uniform numbers of (0, 1]: float32, or float64 for ``double``."""
    words, lane = draws.words(index)
    if draws.double:
        low, high = (_lane(words, 2 * lane + word).astype(np.uint64) for word in (0, 1))
        bits = low ^ (high << np.uint64(21))
        return bits.astype(np.float64) * 2.0**-53 + 2.0**-54
    return _unit(_lane(words, lane))


def uniform(draws: Draws, index: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return what ``uniform_(low, high)`` draws in float32."""
    low32, range32 = np.float32(low), np.float32(high) - np.float32(low)
    # One rounding, as the device's fused multiply-add.
    value = (units(draws, index).astype(np.float64) * range32 + low32).astype(np.float32)
    return np.where(value == np.float32(high), low32, value)


def normal(draws: Draws, index: np.ndarray, mean: float, std: float) -> np.ndarray:
    """Return what ``normal_(mean, std)`` draws in float32, but for the last bits of log and sin."""
    words, lane = draws.words(index)
    first = lane // 2 * 2
    radius = np.sqrt(np.float32(-2) * np.log(_unit(_lane(words, first))))
    angle = _lane(words, first + 1).astype(np.float32) * TO_CIRCLE + TO_CIRCLE / np.float32(2)
    wave = np.where(lane % 2 == 0, np.sin(angle), np.cos(angle))
    return (wave * radius * np.float32(std) + np.float32(mean)).astype(np.float32)


def bernoulli(draws: Draws, index: np.ndarray, p: float) -> np.ndarray:
    """Return what ``bernoulli_(p)`` draws; for dropout ``p`` is the share that it keeps."""
    unit = units(draws, index)
    return unit < unit.dtype.type(p)


def _lane(words: np.ndarray, lane: np.ndarray) -> np.ndarray:
    return np.take_along_axis(words, lane[:, None], 1)[:, 0]


def _unit(words: np.ndarray) -> np.ndarray:
    return words.astype(np.float32) * TO_UNIT + TO_UNIT / np.float32(2)
