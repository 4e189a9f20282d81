# SPDX-License-Identifier: Apache-2.0
"""Store float32 state as 8-bit codes and one float32 scale for each block.

A scale is the largest magnitude of its block, so nothing outside of a block has a say in it. Only
operations that IEEE 754 rounds exactly are used: the same numbers give the same codes wherever
they lie, on any device and among any number of ranks.
"""

import torch
import torch.nn.functional as F

from vescale.fsdp.optim.codebooks import nearest_codes, values_of
from vescale.fsdp.tiles import Tiling

# Below it, a scale times the smallest code would leave float32's normal range.
_LEAST_SCALE = 2.0**-100


def encode(
    values: torch.Tensor, tiling: Tiling, *, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(codes, scales)`` of ``values``: uint8 [n] and float32 [bands, columns of blocks].

    ``values``, float32 [n], begin at the start of a block of ``tiling`` and end with one, or with
    the tensor. Signed codes are the nearest. Unsigned ones too, but a positive value never becomes
    0: what Adam divides by must not vanish where a later numerator does not.

    A NaN or an infinity makes the scale of its block NaN or infinite.
    """
    blocks = _blocks(values, tiling)
    largest = (blocks.abs() if signed else blocks).amax(dim=(1, 3), keepdim=True)
    if signed:
        scales = largest
    else:
        scales = torch.where(largest > 0, largest.clamp(min=_LEAST_SCALE), largest)
    parts = blocks / torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = nearest_codes(parts, signed=signed)
    if not signed:
        codes = keep_positive(codes, blocks)
    return _unblock(codes.to(torch.uint8), tiling, values.numel()), scales[:, 0, :, 0].contiguous()


def keep_positive(codes: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return ``codes`` with 1 for 0 where the value that it stands for is positive."""
    return torch.where(blocks > 0, codes.clamp(min=1), codes)


def decode(
    codes: torch.Tensor, scales: torch.Tensor, tiling: Tiling, *, signed: bool
) -> torch.Tensor:
    """Return the float32 values [n] of ``codes`` [n] and ``scales``, as ``encode`` gave them."""
    parts = values_of(_blocks(codes, tiling), signed=signed)
    return _unblock(parts.mul_(scales[:, None, :, None]), tiling, codes.numel())


def _blocks(flat: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """Return ``flat`` [n] as [bands, tile rows, columns of blocks, tile cols], filled with zeros.

    A view where nothing has to be filled.
    """
    rows, cols = tiling.tile
    bands, across = tiling.bands(flat.numel()), tiling.grid[1]
    missing = bands * tiling.band_numel - flat.numel()
    whole = F.pad(flat, (0, missing)) if missing else flat
    whole = whole.view(bands * rows, tiling.cols)
    if across * cols != tiling.cols:
        whole = F.pad(whole, (0, across * cols - tiling.cols))
    return whole.view(bands, rows, across, cols)


def _unblock(blocks: torch.Tensor, tiling: Tiling, numel: int) -> torch.Tensor:
    """Return the first ``numel`` elements of what ``_blocks`` arranged, in memory order."""
    bands, rows, across, cols = blocks.shape
    matrix = blocks.view(bands * rows, across * cols).narrow(1, 0, tiling.cols)
    return matrix.reshape(-1).narrow(0, 0, numel)
