# SPDX-License-Identifier: Apache-2.0
"""The blocks that SOAP divides a parameter into, what a step computes of them, what they store.

A matrix has bands of at most ``size`` rows, each of which has one root, and a band has blocks of at
most ``size`` columns. Sizes are in elements.
"""

import math
from collections.abc import Sequence

from vescale.fsdp.optim.blocks import RowBlock, row_blocks
from vescale.fsdp.optim.eigenbasis import flops, state_shapes
from vescale.fsdp.optim.roots import Matrix, Piece

BLOCK_SIZE, FREQUENCY = 1024, 10  # the defaults of SOAP


def bands_of(shape: Sequence[int], size: int) -> tuple[RowBlock, ...]:
    """Return the bands of a parameter [rows, cols] or [experts, rows, cols]."""
    return row_blocks(shape, lambda _, whole: cut_into(whole[-2], size) or [0], "")


def cut_into(length: int, size: int) -> list[int]:
    """Return lengths of ``size`` that add up to ``length``; the last may be shorter."""
    return [min(size, length - start) for start in range(0, length, size)]


def matrix_of(band: RowBlock, pieces: tuple[Piece, ...], size: int, frequency: int) -> Matrix:
    """Return the band as what gets a root, with the work of a step."""
    work = sum(flops(band.rows, cols, frequency) for cols in cut_into(band.cols, size))
    return Matrix(*band.shape, pieces, flops=work)


def state_numel(band: RowBlock, size: int) -> int:
    """Return the elements of the states of all blocks of the band."""
    return sum(
        math.prod(shape)
        for cols in cut_into(band.cols, size)
        for shape in state_shapes(band.rows, cols).values()
    )
