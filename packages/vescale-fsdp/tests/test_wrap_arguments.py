# SPDX-License-Identifier: Apache-2.0
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from testing.ranks import DEVICE
from vescale.fsdp import FSDPModule, MixedPrecisionPolicy, Rows, fully_shard
from vescale.fsdp.wrap_arguments import ignored_set

WRONG = {
    "lanes": 7,
    "reshard_after_forward": 5,
    "mp_policy": 3,
    "offload_policy": 3,
    "ignored_params": [3],
    "shard_placement_fn": 3,
    "granularity": 3,
}


def check_one_rank(rank, world_size):
    """The others hear of it, wrap nothing, and can go on."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    odd = rank == world_size - 1
    kind = (TypeError, ValueError) if odd else RuntimeError
    model = nn.Linear(4, 4).to(DEVICE)
    for name, value in WRONG.items():
        with pytest.raises(kind, match=name):
            fully_shard(model, mesh=mesh, **({name: value} if odd else {}))
    for wrong in (3, [], nn.ModuleList([nn.Linear(4, 4)])):
        with pytest.raises(kind, match=r"module is a|an empty list|no forward"):
            fully_shard(wrong if odd else model, mesh=mesh)
    assert not isinstance(model, FSDPModule)
    fully_shard(model, mesh=mesh)


def check_options_that_differ(rank, world_size):
    """Only what differs is told, by the names that the caller knows it by."""
    mesh, odd = init_device_mesh(DEVICE, (world_size,)), rank == world_size - 1
    unit = f"Linear over 1 x {world_size} ranks"
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options, mine, its in (
        (
            {"mp_policy": low if odd else MixedPrecisionPolicy()},
            "mp_policy.param_dtype=None; mp_policy.reduce_dtype=None",
            "mp_policy.param_dtype=torch.bfloat16; mp_policy.reduce_dtype=torch.float32",
        ),
        ({"lanes": 1 if odd else 2}, "lanes=2", "lanes=1"),
        (
            {"reshard_after_forward": odd},
            "reshard_after_forward=False",
            "reshard_after_forward=True",
        ),
    ):
        match = re.escape(f"differ first at: '{unit}; {mine}' and '{unit}; {its}'. Build")
        with pytest.raises(RuntimeError, match=match):
            fully_shard(nn.Linear(4, 4).to(DEVICE), mesh=mesh, **options)
    granularity = Rows(2) if odd else Rows(4)
    match = re.escape("at: 'weight; granularity=Rows(n=4)' and 'weight; granularity=Rows(n=2)'")
    with pytest.raises(RuntimeError, match=match):
        fully_shard(nn.Linear(4, 4).to(DEVICE), mesh=mesh, granularity=granularity)


def check_wrong_and_different(rank, world_size):
    check_one_rank(rank, world_size)
    check_options_that_differ(rank, world_size)


def test_a_wrong_argument_on_one_rank_is_told_to_all(run_ranks):
    run_ranks(check_wrong_and_different, 2)


def test_parameters_to_ignore_may_come_from_a_generator(fake_group):
    fake_group(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weight = model[0].weight
    fully_shard(model, ignored_params=model[0].parameters())
    assert model[0].weight is weight
    assert hasattr(model[1].weight, "placements")


@pytest.mark.parametrize("wrong", [5, "weight", [3], nn.Parameter(nn.Linear(1, 1).weight)])
def test_what_is_no_set_of_parameters_is_refused(wrong):
    with pytest.raises(TypeError, match=r"expected a set of nn\.Parameter; pass"):
        ignored_set(wrong)
