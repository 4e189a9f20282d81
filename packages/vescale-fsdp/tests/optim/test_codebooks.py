# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vescale.fsdp.optim.codebooks import (
    dynamic_map,
    nearest_codes,
    rounding_borders,
    values_of,
    zero_code,
)


@pytest.mark.parametrize("signed", [True, False])
def test_maps_have_256_sorted_values_dense_near_zero(signed):
    values = dynamic_map(signed)
    assert values.shape == (256,)
    assert (values.diff() > 0).all()
    assert values[-1] == 1
    assert values[zero_code(signed)] == 0
    assert values[0] >= -1 if signed else values[0] == 0
    least = values[values > 0].min()
    assert least == pytest.approx(5.5e-7 if signed else 3.25e-7)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_nearest_values(signed):
    borders = rounding_borders(signed)
    generator = torch.Generator().manual_seed(0)
    magnitudes = 10.0 ** -torch.randint(0, 9, (20_000,), generator=generator)
    parts = torch.rand(20_000, generator=generator) * magnitudes
    two = torch.tensor(2.0)
    parts = torch.cat((parts, borders, borders.nextafter(two), borders.nextafter(-two)))
    parts = torch.cat((parts, dynamic_map(signed), torch.tensor([0.0, -0.0, 1e-45, 1.0])))
    parts = torch.cat((parts, -parts)) if signed else parts[parts >= 0]
    codes = nearest_codes(parts, signed=signed)
    assert torch.equal(codes, torch.bucketize(parts, borders, out_int32=True))
    distance = (parts[:, None].double() - dynamic_map(signed).double()).abs().amin(1)
    chosen = (parts.double() - values_of(codes.byte(), signed=signed).double()).abs()
    assert ((chosen - distance) <= 3e-7 * parts.abs()).all()


def test_no_number_is_without_a_code():
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.0])
    codes = nearest_codes(odd, signed=True)
    assert 0 <= codes.min() <= codes.max() <= 255
    assert codes[-1] == 255
