# SPDX-License-Identifier: Apache-2.0
import copy
import warnings

import pytest
import torch
from torch import nn

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import fully_shard


def wrapped(**options):
    model = build().to(DEVICE)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model, **options)


def warned(model, rank):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loss_of(model, batch(0, rank, DEVICE))
    return [str(item.message) for item in found if "fully_shard" in str(item.message)]


def check_all(rank, world_size):
    assert warned(wrapped(), rank) == []
    # Added to a unit, and in the place of a module of one.
    model = wrapped()
    model.layers[1].adapter = nn.Linear(4, 4).to(DEVICE)
    model.head = copy.deepcopy(build().head).to(DEVICE)
    (text,) = warned(model, rank)
    assert text.startswith("layers.1.adapter.weight, layers.1.adapter.bias, head.weight: these")
    assert warned(model, rank) == []  # once
    # What was to be left alone, is frozen, or is wrapped itself needs no words.
    model = build().to(DEVICE)
    model.side = nn.Linear(4, 4).to(DEVICE)
    fully_shard(model, ignored_params=set(model.side.parameters()))
    model.table = nn.Parameter(torch.ones(3, device=DEVICE), requires_grad=False)
    model.late = fully_shard(nn.Linear(4, 4).to(DEVICE))
    clone = copy.deepcopy(model)
    assert warned(model, rank) == []
    assert warned(clone, rank) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_that_came_later_are_named(run_ranks, world_size):
    run_ranks(check_all, world_size)
