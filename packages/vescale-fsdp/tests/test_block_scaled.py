# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale.fsdp import Block, BlockScaled, Elements, Rows
from vescale.fsdp.block_scaled import LARGEST, check_gather_as, decode, encode

DTYPES = tuple(LARGEST)


def by_hand(matrix, dtype, block):
    """Return what ``round`` returns, a tile at a time."""
    out = torch.empty_like(matrix)
    for row in range(0, matrix.shape[0], block):
        for col in range(0, matrix.shape[1], block):
            tile = matrix[row : row + block, col : col + block].float()
            scale = tile.abs().max() / LARGEST[dtype]
            values = tile / scale if scale > 0 else tile
            codes = values.round() if dtype == torch.int8 else values.to(dtype).float()
            out[row : row + block, col : col + block] = codes * scale
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 70), cols=st.integers(1, 70), block=st.integers(1, 40), seed=st.integers(0)
)
@settings(max_examples=60, deadline=None)
def test_codes_stand_for_the_values(dtype, rows, cols, block, seed):
    torch.manual_seed(seed % 2**31)
    matrix = torch.randn(rows, cols) * 10 ** torch.randn(rows, 1)
    codes = torch.empty(rows, cols, dtype=dtype)
    scales = torch.empty(-(-rows // block), -(-cols // block))
    encode(matrix, codes, scales, block)
    out = torch.empty_like(matrix)
    decode(codes, scales, out, block)
    expected = by_hand(matrix, dtype, block)
    largest = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :cols]
    step = 0.5 if dtype == torch.int8 else 16.0  # of float8_e4m3fn at 448: 3 bits behind the point
    assert bool(((out - matrix).abs() <= 1.001 * step * largest).all())
    # By hand it divides, so a value in the middle between two codes may go to the other one.
    different = (out - expected).abs() > 1e-6 * largest * LARGEST[dtype]
    assert int(different.sum()) <= 0.01 * matrix.numel() + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_is_rounded_by_itself(dtype):
    form = BlockScaled(dtype, 32)
    matrix = torch.randn(100, 70)
    whole = form.round(matrix)
    assert torch.equal(whole[32:], form.round(matrix[32:]))  # what a rank with these rows does
    assert not torch.equal(whole[31:], form.round(matrix[31:]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype):
    form = BlockScaled(dtype, 32)
    zeros = torch.zeros(64, 64)
    assert torch.equal(form.round(zeros), zeros)
    for bad in (float("nan"), float("inf")):
        matrix = torch.ones(64, 96)
        matrix[3, 70] = bad
        out = form.round(matrix)
        assert bool(out[:32, 64:].isnan().all())  # the tile, and no other
        assert torch.equal(out[32:], matrix[32:])
        assert torch.equal(out[:, :64], matrix[:, :64])


def test_what_travels_and_how_it_may_be_cut():
    form = BlockScaled(torch.int8, 32)
    assert form.granularity("w", torch.empty(64, 128)) == Rows(32)
    assert form.granularity("e", torch.empty(8, 64, 128)) == Block(2, 32)
    assert form.granularity("b", torch.empty(5000)) == Elements()
    small, numbers = torch.randn(8, 8), torch.arange(8192).view(64, 128)
    assert torch.equal(form.round(small), small)
    assert torch.equal(form.round(numbers), numbers)
    experts = torch.randn(3, 40, 48).to(torch.bfloat16)
    assert form.round(experts).dtype == torch.bfloat16
    assert torch.equal(form.round(experts).view(120, 48), form.round(experts.view(120, 48)))


def test_wrong_arguments():
    for options, match in (
        ({"dtype": torch.uint8}, "dtype=torch.uint8"),
        ({"dtype": [torch.int8]}, r"dtype=\[torch.int8\], expected"),
        ({"block": 0}, "block=0"),
        ({"block": 2.0}, "block=2.0"),
        ({"block": True}, "block=True"),
    ):
        with pytest.raises(ValueError, match=match):
            BlockScaled(**options)
    with pytest.raises(TypeError, match="gather_as='int8' is a str"):
        check_gather_as("int8")
