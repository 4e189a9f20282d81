# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale.fsdp.optim.codebooks import dynamic_map
from vescale.fsdp.optim.quantize import decode, encode
from vescale.fsdp.tiles import Tiling


def by_loops(matrix, rows, cols, signed):
    """Quantise block by block, with a search over all values, and return what is read back."""
    result = torch.empty_like(matrix)
    table = dynamic_map(signed)
    for r, c in itertools.product(range(0, len(matrix), rows), range(0, matrix.size(1), cols)):
        block = matrix[r : r + rows, c : c + cols]
        scale = block.abs().max()
        parts = block / scale if scale > 0 else block
        codes = (parts[..., None].double() - table.double()).abs().argmin(-1)
        if not signed:
            codes = torch.where(block > 0, codes.clamp(min=1), codes)
        result[r : r + rows, c : c + cols] = table[codes] * scale
    return result


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("shape", "block"), [((5, 7), (2, 3)), ((8, 6), (4, 3)), ((5, 7), 4)])
def test_blocks_are_what_a_loop_over_them_gives(shape, block, signed):
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(
        -9, 3, shape, generator=generator
    )
    matrix[0] = 0
    matrix = matrix if signed else matrix.square()
    tiling = Tiling(shape, block)
    codes, scales = encode(matrix.view(-1), tiling, signed=signed)
    assert (codes.dtype, codes.shape) == (torch.uint8, (matrix.numel(),))
    assert (scales.dtype, scales.shape) == (torch.float32, tiling.grid)
    again = decode(codes, scales, tiling, signed=signed)
    if isinstance(block, int):
        padded = torch.zeros(tiling.grid[0] * block)
        padded[: matrix.numel()] = matrix.view(-1)
        expected = by_loops(padded.view(-1, block), 1, block, signed).view(-1)[: matrix.numel()]
    else:
        expected = by_loops(matrix, *block, signed).view(-1)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


@given(st.integers(1, 70), st.integers(1, 70), st.data())
def test_whole_bands_alone_give_the_bits_of_the_whole(rows, cols, data):
    tiling = Tiling((rows, cols), (8, 16))
    values = torch.randn(rows * cols, generator=torch.Generator().manual_seed(rows * 71 + cols))
    cut = data.draw(st.integers(0, tiling.grid[0])) * tiling.band_numel
    codes, scales = encode(values, tiling, signed=True)
    parts = [p for p in (values[:cut], values[cut:]) if p.numel()]
    pieces = [encode(part, tiling, signed=True) for part in parts]
    assert torch.equal(codes, torch.cat([piece[0] for piece in pieces]))
    assert torch.equal(scales, torch.cat([piece[1] for piece in pieces]))


@pytest.mark.parametrize("largest", [1.0, 1e-30, 1e-42, 1e38])
def test_a_positive_second_moment_never_becomes_zero(largest):
    tiling = Tiling((4, 4), (4, 4))
    values = torch.full((16,), largest) * torch.logspace(0, -30, 16)
    values[-1] = 0
    again = decode(*encode(values, tiling, signed=False), tiling, signed=False)
    assert torch.equal(again > 0, values > 0)


def test_nan_and_infinity_spoil_their_block_only():
    tiling = Tiling((4, 8), (4, 4))
    for bad in (torch.nan, torch.inf):
        for signed in (True, False):
            values = torch.ones(4, 8)
            values[1, 2] = bad
            again = decode(*encode(values.view(-1), tiling, signed=signed), tiling, signed=signed)
            again = again.view(4, 8)
            assert torch.equal(again[:, 4:], torch.ones(4, 4))
            assert not again[:, :4].isfinite().any()
