# SPDX-License-Identifier: Apache-2.0
import torch

from vescale.fsdp.optim.rounding import random_words, round_to_bfloat16, rounding_key


def test_rounding_keeps_the_mean_and_picks_a_neighbour():
    """C5: unbiased. 200,000 roundings of one value, odds 0.3 to round up."""
    low, high = torch.tensor(1.0), torch.tensor(1.0 + 2**-7)
    value = low + 0.3 * (high - low)
    rounded = round_to_bfloat16(value.expand(200_000).contiguous(), rounding_key(0, 1, "w"), 0)
    assert rounded.dtype == torch.bfloat16
    assert set(rounded.unique().tolist()) == {low.item(), high.item()}
    share = (rounded.float() == high).double().mean().item()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / 200_000) ** 0.5

    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(10_000, dtype=torch.float64)
    for step in range(200):
        total += round_to_bfloat16(values, rounding_key(0, step, "w"), 0).double()
    mean, nearest = total / 200, values.bfloat16().double()
    assert (mean - values).abs().mean() < 0.25 * (nearest - values).abs().mean()


def test_what_bfloat16_holds_is_kept():
    values = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, 2.0**-130])
    rounded = round_to_bfloat16(values, rounding_key(3, 4, "w"), 5)
    assert torch.equal(rounded, values.bfloat16())
    payload = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert round_to_bfloat16(payload, rounding_key(0, 0, ""), 0).isnan().all()


def test_a_part_is_rounded_like_the_whole():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    key = rounding_key(0, 7, "layers.0.w")
    whole = round_to_bfloat16(values, key, 0)
    parts = [round_to_bfloat16(values[a:b], key, a) for a, b in ((0, 33), (33, 500), (500, 1000))]
    assert torch.equal(whole, torch.cat(parts))
    for other in (rounding_key(1, 7, "layers.0.w"), rounding_key(0, 8, "layers.0.w")):
        assert not torch.equal(whole, round_to_bfloat16(values, other, 0))
    assert rounding_key(0, 7, "a") != rounding_key(0, 7, "b")


def test_words_are_spread_evenly_also_far_out():
    for start in (0, 2**32 - 5000, 2**40):
        words = random_words(torch.arange(start, start + 10_000), rounding_key(0, 0, "w"))
        assert 0 <= words.min() <= words.max() < 2**32
        ones = torch.stack([(words >> bit) & 1 for bit in range(32)]).double().mean(1)
        assert (ones - 0.5).abs().max() < 0.03
        assert words.unique().numel() > 9_990
