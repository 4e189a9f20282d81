# SPDX-License-Identifier: Apache-2.0
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from vescale.fsdp.checkpoint.rank_state import generators, pack, set_generators, unpack

CPU = torch.device("cpu")


def draw():
    return random.random(), float(np.random.rand()), torch.rand(2).tolist(), random.gauss(0, 1)


def test_generators_go_on_where_they_were():
    random.gauss(0, 1)  # keeps a second number for later
    np.random.randn()
    packed = pack(generators(CPU))
    assert packed.dtype == torch.uint8
    expected = draw()
    draw()
    set_generators(unpack(packed), CPU)
    assert draw() == expected


def test_only_what_can_be_read_without_running_code_is_packed():
    value = {"epoch": 3, "order": torch.arange(4), "names": ["a", None], "rate": 0.5}
    back = unpack(pack(value))
    assert torch.equal(back.pop("order"), value.pop("order"))
    assert back == value
    with pytest.raises(TypeError, match="rank_state has something"):
        pack({"file": Path("a")})
