# SPDX-License-Identifier: Apache-2.0
"""Move torch's CPU generator, an MT19937, ahead by any number of words without drawing them.

The state is linear over GF(2): n steps are the polynomial ``x**n`` modulo the characteristic
polynomial, applied to the words that follow (Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer,
2008). A word is 32 bits.
"""

import functools

import numpy as np
import torch

N, M = 624, 397
DEGREE = 19937
STATE_BYTES = 5056  # of torch's CPU generator, checked on 2.13; ``_fields`` says what is where

# Exponents of the characteristic polynomial with coefficient 1, from Berlekamp-Massey.
# fmt: off
EXPONENTS = (
    0, 1189, 1416, 1585, 1643, 1870, 2493, 2773, 3000, 3227, 3454, 3681, 3908, 4135, 4362, 4753,
    5661, 6337, 6569, 7129, 7477, 7525, 7583, 7752, 7979, 8206, 9505, 9901, 9969, 10128, 10693,
    10761, 10920, 11089, 11147, 11157, 11215, 11321, 11374, 11384, 11485, 11611, 11712, 11717,
    11838, 11881, 11944, 11997, 12277, 12335, 12393, 12504, 12509, 12620, 12673, 12731, 12736,
    12789, 12905, 12958, 12963, 13137, 13185, 13190, 13243, 13301, 13412, 13528, 13533, 13639,
    13697, 13760, 13813, 13866, 14093, 14151, 14209, 14320, 14325, 14436, 14547, 14552, 14605,
    14721, 14774, 14779, 14953, 15001, 15006, 15059, 15117, 15228, 15344, 15349, 15455, 15513,
    15576, 15629, 15682, 15909, 15967, 16025, 16136, 16141, 16252, 16363, 16368, 16421, 16537,
    16590, 16595, 16817, 16822, 16875, 16933, 17044, 17160, 17271, 17329, 17445, 17498, 17725,
    17783, 17841, 17952, 18068, 18179, 18237, 18406, 18633, 18691, 18860, 19087, 19314, DEGREE,
)
# fmt: on

UPPER, LOWER, TWIST = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
FEW_BLOCKS = 64  # twisting these costs less than a jump
STRIDE = 32  # jumps are multiples of so many blocks, so that like distances share one
COLD_WORDS, KNOWN_WORDS = 50_000_000, 5_000_000  # drawing more costs more than jumping

# Squaring a polynomial over GF(2) puts a 0 after each bit; this does it for a byte.
_SPREAD = np.array(
    [sum(((byte >> bit) & 1) << (2 * bit) for bit in range(8)) for byte in range(256)], np.uint16
)


def seek(generator: torch.Generator, words: int) -> None:
    """Advance a CPU ``generator`` by ``words``, as drawing them would; exact."""
    if words == 0:
        return
    state = generator.get_state()
    left, following, block = _fields(state)
    position = (N if left[0] == 1 else int(following[0])) + words
    blocks = (position - 1) // N
    if blocks:
        block[:] = _after(block.astype(np.uint32), blocks)
    following[0] = position - blocks * N
    left[0] = N + 1 - following[0]
    generator.set_state(state)


def pays(words: int) -> bool:
    """Tell whether ``seek`` is faster than drawing; a distance that was sought before is."""
    return words >= COLD_WORDS or (words >= KNOWN_WORDS and words // (STRIDE * N) in _sought)


def drawn_since_seeded(generator: torch.Generator) -> int:
    """Return the words drawn since seeding, at most 624 of them."""
    return int(_fields(generator.get_state())[1][0])


_sought: set[int] = set()


def _fields(state: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return views of ``state``: words left of the block plus 1, next word, the block."""
    data = state.numpy()
    if data.shape != (STATE_BYTES,):
        raise NotImplementedError(
            f"a generator state of shape {data.shape} is not that of torch's CPU generator, "
            f"{STATE_BYTES} bytes; pass a torch.Generator('cpu')."
        )
    return (
        data[8:12].view(np.int32),
        data[16:24].view(np.uint64),
        data[24 : 24 + 8 * N].view(np.uint64),
    )


def _after(block: np.ndarray, blocks: int) -> np.ndarray:
    """Return the block [N] that comes ``blocks`` after ``block``."""
    if blocks <= FEW_BLOCKS:
        return _words(block, blocks)[-N:]
    strides = (blocks - 1) // STRIDE
    # The jump gets right the 19937 bits that matter, and a twist all of the words.
    return _words(_jump(block, strides), blocks - strides * STRIDE)[-N:]


def _words(block: np.ndarray, blocks: int) -> np.ndarray:
    """Return ``block`` and the untempered words of the next ``blocks``, flat."""
    out = np.empty((blocks + 1) * N, np.uint32)
    out[:N] = block
    for new in range(N, len(out), N):
        old = new - N
        for start, end in ((0, N - M), (N - M, 2 * (N - M)), (2 * (N - M), N - 1)):
            y = (out[old + start : old + end] & UPPER) | (
                out[old + start + 1 : old + end + 1] & LOWER
            )
            far = out[old + start + M : old + end + M]
            out[new + start : new + end] = far ^ (y >> np.uint32(1)) ^ np.where(y & 1, TWIST, 0)
        y = (out[new - 1] & UPPER) | (out[new] & LOWER)
        out[new + N - 1] = out[new + M - 1] ^ (y >> np.uint32(1)) ^ (TWIST if y & 1 else 0)
    return out


def _jump(block: np.ndarray, strides: int) -> np.ndarray:
    bits = _power(strides * STRIDE * N)
    following = _words(block, -(-DEGREE // N) + 1)
    windows = np.lib.stride_tricks.sliding_window_view(following, N)
    out = np.zeros(N, np.uint32)
    for first in range(0, len(bits), 256):  # a bounded copy
        out ^= np.bitwise_xor.reduce(windows[bits[first : first + 256]], axis=0)
    _sought.update((strides, strides + 1))
    return out


@functools.lru_cache(maxsize=256)
def _power(n: int) -> np.ndarray:
    """Return the exponents with coefficient 1 of ``x**n`` modulo the polynomial."""
    power = 1
    for bit in bin(n)[2:]:
        spread = _SPREAD[np.frombuffer(power.to_bytes(DEGREE // 8 + 1, "little"), np.uint8)]
        power = _reduce(int.from_bytes(spread.tobytes(), "little"))
        if bit == "1":
            power = _reduce(power << 1)
    packed = np.frombuffer(power.to_bytes(DEGREE // 8 + 1, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little"))


def _reduce(polynomial: int) -> int:
    while high := polynomial >> DEGREE:
        polynomial &= (1 << DEGREE) - 1
        for exponent in EXPONENTS[:-1]:
            polynomial ^= high << exponent
    return polynomial
