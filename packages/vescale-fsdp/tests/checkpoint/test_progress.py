# SPDX-License-Identifier: Apache-2.0
import json
from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR, SequentialLR

from vescale.fsdp.checkpoint.progress import PAIRS, from_json, to_json


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": [1, 2.5, None, True, "\xfc"]}, "c": float("inf")},
        {1: "number", "1": "text", False: 0, None: {2.5: {}}, "": []},
        {PAIRS: 3, "other": {PAIRS: [[1, 2]]}},
        {"milestones": Counter({3: 2, 5: 1})},
        [],
    ],
)
def test_what_json_has_comes_back_as_it_was_with_its_keys(value):
    data = to_json(value)
    assert from_json(json.loads(json.dumps(data))) == value
    assert to_json(from_json(data)) == data


def test_plain_dicts_stay_readable():
    assert to_json({"samples": 8, "losses": (1.0, 2.0)}) == {"samples": 8, "losses": [1.0, 2.0]}


def test_the_rest_is_refused():
    circle = {}
    circle["a"] = circle
    for wrong in (object(), {"a": torch.ones(1)}, {(1, 2): 3}, b"bytes", {1}, circle, 10**5000):
        with pytest.raises(TypeError, match="progress has something that JSON does not"):
            to_json({"nested": [wrong]})


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: MultiStepLR(optimizer, [3, 5, 5], gamma=0.1),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=9),
        lambda optimizer: SequentialLR(
            optimizer,
            [LambdaLR(optimizer, lambda step: step / 2), MultiStepLR(optimizer, [1, 2])],
            [2],
        ),
    ],
)
def test_schedules_go_on_from_their_states(make):
    def start():
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        return optimizer, make(optimizer)

    def rates(optimizer, scheduler, steps):
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = start()
    rates(optimizer, scheduler, 2)
    saved = to_json(scheduler.state_dict()), optimizer.state_dict()
    expected = rates(optimizer, scheduler, 6)
    optimizer, scheduler = start()
    scheduler.load_state_dict(from_json(saved[0]))
    optimizer.load_state_dict(saved[1])
    assert rates(optimizer, scheduler, 6) == expected
