# SPDX-License-Identifier: Apache-2.0
"""Cut a tensor into blocks that share one scale, so that no rank boundary need cut a block.

Integers only. A tensor of more than two dims counts as one matrix: ``leading`` of its dims are the
rows, the rest the columns. All sizes are in elements.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vescale.fsdp.granularity import Block, Granularity, Rows

LEAST_NUMEL = 4096

BlockSize = tuple[int, int] | int


def check_block(block: BlockSize) -> BlockSize:
    """Return ``block`` as ints: (rows, cols) of a tile, or elements of a run of memory.

    Raises ValueError for anything else.
    """
    sizes = block if isinstance(block, tuple | list) else (block,)
    if len(sizes) > 2 or not sizes or any(type(n) is not int or n < 1 for n in sizes):
        raise ValueError(
            f"block={block!r}, expected (rows, cols) of a tile, such as (32, 32), or the elements "
            "of a run of memory, such as 256."
        )
    return tuple(sizes) if isinstance(block, tuple | list) else block  # type: ignore[return-value]  # of two


def deserves_blocks(shape: Sequence[int]) -> bool:
    """Tell whether 8-bit state is worth it: for two dims and more, and 4096 elements and more."""
    return len(shape) >= 2 and math.prod(shape) >= LEAST_NUMEL


def leading_dims(shape: Sequence[int], tile_cols: int) -> int:
    """Return how many leading dims of ``shape`` are the rows of its matrix.

    All but the last for matrices and fused experts [experts, out, in]; fewer where the last dims
    together are narrower than a tile, as in a convolution [out, in, 3, 3]. At least one.
    """
    leading = len(shape) - 1
    while leading > 1 and math.prod(shape[leading:]) < tile_cols:
        leading -= 1
    return max(leading, 1)


@dataclass(frozen=True, slots=True)
class Tiling:
    """The blocks of a tensor of ``shape``, which has at least one dim.

    ``block`` is (rows, cols) of a tile, or the elements of a run of memory. Blocks at the end may
    be short.
    """

    shape: tuple[int, ...]
    block: BlockSize

    @property
    def tile(self) -> tuple[int, int]:
        """(rows, cols) of a block; runs of memory are one row each."""
        return self.block if isinstance(self.block, tuple) else (1, self.block)

    @property
    def leading(self) -> int:
        """Leading dims that are rows; all for runs of memory."""
        flat = not isinstance(self.block, tuple)
        return len(self.shape) if flat else leading_dims(self.shape, self.tile[1])

    @property
    def cols(self) -> int:
        """Elements of one row of the matrix; those of a block for runs of memory."""
        if not isinstance(self.block, tuple):
            return self.block
        return math.prod(self.shape[self.leading :])

    @property
    def band_numel(self) -> int:
        """Elements of one row of blocks: what must not be cut."""
        return self.tile[0] * self.cols

    @property
    def grid(self) -> tuple[int, int]:
        """Number of blocks in both directions: the shape of the scales."""
        return self.bands(math.prod(self.shape)), -(-self.cols // self.tile[1])

    def bands(self, numel: int) -> int:
        """Return how many rows of blocks ``numel`` elements take, from the start of a block on."""
        return -(-numel // self.band_numel) if self.band_numel else 0

    def fits(self, runs: Sequence[tuple[int, int]]) -> bool:
        """Tell whether no rank boundary cuts a block; ``runs`` are pairs ``(numel, ranks)``."""
        numel, band, end = math.prod(self.shape), self.band_numel, 0
        for size, ranks in runs:
            if not size:
                continue
            whole = ranks - 1 if end + size * ranks == numel else ranks  # the last may be short
            if end % band or (whole and size % band):
                return False
            end += size * ranks
        return True

    @property
    def granularity(self) -> Granularity:
        """The granularity that keeps blocks whole."""
        if self.leading == 1 and isinstance(self.block, tuple):
            return Rows(self.block[0])
        return Block(self.leading, self.block[0] if isinstance(self.block, tuple) else self.block)
