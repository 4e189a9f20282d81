# SPDX-License-Identifier: Apache-2.0
"""Round float32 to bfloat16 at random, by bits that follow from an element's place in its tensor.

So every number of ranks rounds alike, and no generator has a state to save.
"""

import hashlib

import torch

_WORD = 0xFFFFFFFF


def rounding_key(seed: int, step: int, name: str) -> tuple[int, int]:
    """Return two 32-bit words that stand for one step of one parameter."""
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4]), int.from_bytes(digest[4:])


def round_to_bfloat16(values: torch.Tensor, key: tuple[int, int], start: int) -> torch.Tensor:
    """Return ``values``, float32 [n], in bfloat16, up or down with the odds that keep the mean.

    ``start`` is the place of ``values[0]`` in the whole tensor, in elements.
    """
    places = torch.arange(start, start + values.numel(), device=values.device)
    noise = random_words(places, key) >> 16
    bits = values.view(torch.int32) + noise.to(torch.int32)
    rounded = (bits & -65536).view(torch.float32)
    # The noise could carry a NaN over into a number.
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)


def random_words(places: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Return a 32-bit word for each of ``places``, int64, as int64 in [0, 2**32)."""
    words = _mix((places & _WORD) ^ key[0])
    return _mix(words ^ (places >> 32) ^ key[1])


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Return a bijection of 32-bit words in which every bit of the input changes half the output.

    Multipliers and shifts: https://github.com/skeeto/hash-prospector (public domain).
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)
