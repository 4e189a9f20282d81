# SPDX-License-Identifier: Apache-2.0
"""The 256 values that 8-bit optimizer state can take, as parts of a block's largest magnitude.

Dynamic maps: most values lie near zero, where most state is. Source: arXiv:2110.02861, section 2.1.
"""

import functools

import torch

_DECADES = 7


@functools.cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """Return the sorted values, float32 [256] on the CPU, in [-1, 1] or, unsigned, in [0, 1].

    Zero, one, and the middles of equal steps in each of seven decades below 1: in the highest 64 of
    either sign or, unsigned, 128; half as many in each next one. The smallest non-zero magnitude is
    5.5e-7 or, unsigned, 3.25e-7. Shared: do not write to it.
    """
    values = [torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    for decade in range(_DECADES):
        steps = 2 ** (_DECADES - decade - int(signed))
        middles = 0.1 + 0.9 * (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
        values += [middles * 10.0**-decade] + ([-middles * 10.0**-decade] if signed else [])
    return torch.cat(values).sort().values.float()


@functools.cache
def rounding_borders(signed: bool) -> torch.Tensor:
    """Return the values [255] half way between neighbours: where rounding changes its mind."""
    values = dynamic_map(signed).double()
    return ((values[1:] + values[:-1]) / 2).float()


@functools.cache
def zero_code(signed: bool) -> int:
    """Return the code of 0.0."""
    return int((dynamic_map(signed) == 0).nonzero())


@functools.cache
def _tables(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (values, borders, first codes) on ``device``; computed and copied there once.

    First codes, int32 [2**16], are the codes of the least number of each bucket of float32 numbers
    that agree in their upper 16 bits. No bucket holds more than one border.
    """
    upper = torch.arange(2**16, dtype=torch.int32)
    negative = upper >= 2**15
    least = ((upper << 16) + 0xFFFF * negative.int()).view(torch.float32)
    borders = rounding_borders(signed)
    first = torch.bucketize(least, borders, out_int32=True)
    borders = torch.cat((borders, torch.tensor([torch.inf])))  # above the last code
    return dynamic_map(signed).to(device), borders.to(device), first.to(device)


def nearest_codes(parts: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return the int32 codes of the values nearest to ``parts``, float32, contiguous.

    Half way between two it is the lower one; NaN gets a code too, any one.
    """
    _, borders, first = _tables(signed, parts.device)
    flat = parts.view(-1)
    codes = first.index_select(0, (flat.view(torch.int32) >> 16) & 0xFFFF)
    codes += flat > borders.index_select(0, codes)
    return codes.view(parts.shape)


def values_of(codes: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return the float32 values of uint8 ``codes``, contiguous."""
    table, _, _ = _tables(signed, codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
