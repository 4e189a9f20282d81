# SPDX-License-Identifier: Apache-2.0
"""Numbers of one byte with one scale for each tile of a matrix: how weights may travel.

A tile's scale is its largest absolute value over the largest code (127 for int8, 448 for
float8_e4m3fn), so it needs nothing from outside of the tile. A tile with a NaN or an infinity
becomes NaN as a whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale.fsdp.granularity import Granularity, default_granularity
from vescale.fsdp.tiles import Tiling, deserves_blocks

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """How weights are gathered, for ``fully_shard(gather_as=...)``.

    As codes of ``dtype``, torch.int8 or torch.float8_e4m3fn, and a float32 scale for each tile of
    ``block`` x ``block`` elements: floating-point parameters of at least two dims and 4096
    elements. Others travel as they are. Of a tensor with more than two dims the last one (or as
    many as a tile is wide) has the columns.
    """

    dtype: torch.dtype = torch.int8
    block: int = 32

    def __post_init__(self) -> None:
        if not any(self.dtype is known for known in LARGEST):  # it may be anything
            raise ValueError(
                f"BlockScaled: dtype={self.dtype!r}, expected torch.int8 or torch.float8_e4m3fn."
            )
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"BlockScaled: block={self.block!r}, expected a positive integer.")

    def tiling(self, shape: Sequence[int], dtype: torch.dtype) -> Tiling | None:
        """Return the tiles of a parameter, None for one that travels as it is."""
        if not dtype.is_floating_point or not deserves_blocks(shape):
            return None
        return Tiling(tuple(shape), (self.block, self.block))

    def granularity(self, fqn: str, param: Any) -> Granularity:
        """Return the granularity that keeps tiles whole; for ``fully_shard(granularity=...)``."""
        tiling = self.tiling(param.shape, param.dtype)
        return default_granularity(param.shape) if tiling is None else tiling.granularity

    def round(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what arrives of ``tensor`` [...], a parameter that travels: a copy of its shape
        and dtype; ``tensor`` itself, if it travels as it is. Not differentiable.

        A model of one process that computes with it has the results of the sharded one.
        """
        tensor = tensor.detach()
        tiling = self.tiling(tensor.shape, tensor.dtype)
        if tiling is None:
            return tensor
        matrix = tensor.reshape(-1, tiling.cols)
        codes = torch.empty(matrix.shape, dtype=self.dtype, device=tensor.device)
        scales = matrix.new_empty(tiling.grid, dtype=torch.float32)
        encode(matrix, codes, scales, self.block)
        out = torch.empty_like(matrix)
        decode(codes, scales, out, self.block)
        return out.view(tensor.shape)


def check_gather_as(value: object) -> None:
    """Raise TypeError unless ``value`` is None or a BlockScaled."""
    if value is not None and not isinstance(value, BlockScaled):
        raise TypeError(
            f"gather_as={value!r} is a {type(value).__name__}, expected BlockScaled(...) or None."
        )


def encode(matrix: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Write the codes and scales of ``matrix`` [rows, cols] into ``codes`` [rows, cols] of their
    dtype and ``scales`` [row blocks, column blocks]."""
    largest = LARGEST[codes.dtype]
    for at, scale in _regions(scales, block, matrix.shape):
        values = at(matrix).float()
        steps = values.abs().amax((1, 3)).div_(largest)
        scale.copy_(steps)
        factors = torch.where(steps == 0, 0.0, 1.0 / steps)
        values = values * factors[:, None, :, None]
        if codes.dtype == torch.int8:
            values.round_()
        # A NaN has no code: its scale brings it back.
        at(codes).copy_(values.nan_to_num_(0.0).clamp_(-largest, largest))


def decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, block: int) -> None:
    """Write the values of ``codes`` [rows, cols] and ``scales`` into ``out`` [rows, cols]."""
    for at, scale in _regions(scales, block, codes.shape):
        factors = scale.float()[:, None, :, None]
        if codes.dtype == torch.int8:
            torch.mul(at(codes), factors, out=at(out))
        else:  # there is no arithmetic on float8
            at(out).copy_(at(codes).float().mul_(factors))


def _regions(
    scales: torch.Tensor, block: int, shape: Sequence[int]
) -> Iterator[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]]:
    """Yield what views a matrix as [tiles, rows, tiles, cols], and the scales [tiles, tiles].

    Four at most: whole tiles, and short ones at both ends.
    """
    for row, row_tiles, height in _spans(shape[0], block):
        for col, col_tiles, width in _spans(shape[1], block):

            def at(
                matrix: torch.Tensor,
                row: int = row,
                n: int = row_tiles,
                height: int = height,
                col: int = col,
                m: int = col_tiles,
                width: int = width,
            ) -> torch.Tensor:
                part = matrix[row : row + n * height, col : col + m * width]
                return part.unflatten(1, (m, width)).unflatten(0, (n, height))

            first, second = row // block, col // block
            yield at, scales[first : first + row_tiles, second : second + col_tiles]


def _spans(size: int, block: int) -> list[tuple[int, int, int]]:
    """Return ``(start, tiles, length of each)``: of the whole tiles, and of the short one."""
    whole, rest = divmod(size, block)
    spans = [(0, whole, block)] if whole else []
    return [*spans, (whole * block, 1, rest)] if rest else spans
