# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale.fsdp.optim.update import add_as_whole, scales


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_piece_gets_the_bits_of_the_whole(dtype, rows, cols, low, high, seed):
    start, end = sorted((int(low * rows * cols), int(high * rows * cols)))
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, cols, generator=generator).to(dtype)
    update = torch.randn(rows, cols, generator=generator).to(torch.bfloat16)
    if rows > cols:  # as Newton-Schulz returns it
        update = update.T.contiguous().T
    whole = weights.clone().add_(update, alpha=-0.0737).view(-1)
    piece = weights.view(-1)[start:end].clone()
    add_as_whole(piece, update.reshape(-1)[start:end], -0.0737, start, weights.shape)
    assert torch.equal(piece, whole[start:end])


def test_scales_follow_both_rules():
    group = {"lr": 0.5, "weight_decay": 0.1, "adjust_lr_fn": None}
    assert scales((16, 4), group) == (0.95, -1.0)
    assert scales((4, 16), group) == (0.95, -0.5)
    group["adjust_lr_fn"] = "match_rms_adamw"
    assert scales((4, 25), group) == (0.95, -0.5)
