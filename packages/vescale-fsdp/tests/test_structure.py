# SPDX-License-Identifier: Apache-2.0
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from vescale.fsdp.structure import cast_floating, map_tensors, tensors_in

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: torch.Tensor
    name: str = "x"


@dataclass
class Derived:
    logits: torch.Tensor = field(init=False)


def test_tensors_are_found_in_order_in_every_container():
    a, b, c, d = (torch.tensor(float(i)) for i in range(4))
    value = [a, (Pair(b, "text"), {"k": Output(c)}), OrderedDict(z=d), 3, None]
    assert [int(t) for t in tensors_in(value)] == [0, 1, 2, 3]


def test_map_keeps_types_and_untouched_values():
    value = {"pair": Pair(torch.ones(1), torch.ones(1, dtype=torch.int64)), "o": OrderedDict(a=1)}
    mapped = cast_floating(torch.bfloat16, value)
    assert type(mapped["pair"]) is Pair
    assert mapped["pair"].left.dtype == torch.bfloat16
    assert mapped["pair"].right is value["pair"].right
    assert mapped["o"] is value["o"]
    assert map_tensors(lambda t: t, value) is value


def test_map_replaces_tensors_in_dataclasses_and_ordered_dicts():
    out = cast_floating(torch.float64, OrderedDict(o=Output(torch.ones(2), "kept")))
    assert type(out) is OrderedDict
    assert out["o"].logits.dtype == torch.float64
    assert out["o"].name == "kept"


def test_a_dataclass_that_cannot_be_rebuilt_is_named():
    value = Derived()
    value.logits = torch.ones(1)
    with pytest.raises(TypeError, match=r"Derived\.logits"):
        cast_floating(torch.float64, value)
