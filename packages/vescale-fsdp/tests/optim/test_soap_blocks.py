# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from vescale.fsdp.optim import SOAP
from vescale.fsdp.optim.soap_blocks import bands_of, cut_into, state_numel


def test_lengths_add_up():
    assert cut_into(10, 4) == [4, 4, 2]
    assert cut_into(8, 4) == [4, 4]
    assert cut_into(0, 4) == []


def test_square_blocks_have_six_elements_a_parameter():
    (band,) = bands_of((1024, 4096), 1024)
    assert state_numel(band, 1024) == 6 * 1024 * 4096


@pytest.mark.parametrize("shape", [(7, 5), (4, 9), (3, 5, 6), (0, 4), (4, 0)])
@pytest.mark.parametrize("size", [2, 4, 16])
def test_state_is_what_the_optimizer_makes(shape, size):
    param = nn.Parameter(torch.ones(shape))
    state = SOAP([param], block_size=size).state[param]
    made = sum(value.numel() for name, value in state.items() if name != "step")
    assert sum(state_numel(band, size) for band in bands_of(shape, size)) == made
