# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from testing.ranks import DEVICE
from vescale.dtensor import RaggedShard
from vescale.dtensor import distribute_tensor as distribute_ragged
from vescale.fsdp.checkpoint.alike import check_alike, describe, differences


def test_descriptions_leave_values_of_tensors_out():
    assert describe(torch.ones(2, 3)) == describe(torch.zeros(2, 3)) == "torch.float32 (2, 3)"
    assert describe(torch.ones(2, 3).bfloat16()) != describe(torch.ones(2, 3))
    assert describe((0.9, [1, "a"], None)) == "[0.9, [1, 'a'], None]"
    assert describe({1}) == "set"


def test_differences_name_keys_and_ranks():
    states = [{"a": "1", "b": "x"}, {"a": "1"}, {"a": "2", "b": "x", "c": "y"}]
    assert differences(states, same_keys=True) == [
        "a is 1 on rank 0 and 2 on rank 2",
        "b is on ranks 0, 2 and not on rank 1",
        "c is on rank 2 and not on ranks 0, 1",
    ]
    assert differences(states, same_keys=False) == ["a is 1 on rank 0 and 2 on rank 2"]


def check_ranks(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    last = rank == world_size - 1

    def make():
        whole = torch.arange(12.0, device=DEVICE).view(4, 3)
        even = [1] * world_size
        return {
            "model": {
                "ragged": distribute_ragged(
                    whole, mesh, [RaggedShard((0, 1), [2, 10][:world_size])]
                )
                if world_size == 2
                else distribute_ragged(whole, mesh, [RaggedShard((0, 1), even)]),
                "shard": distribute_tensor(whole, mesh, [Shard(0)]),
                "plain": whole + rank,
            },
            "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        }

    group = dist.new_group(backend="gloo")
    check_alike(make(), group)
    changes = {
        r"model.extra is on rank \d and not on": lambda s: s["model"].update(extra=3),
        r"model.plain is on rank.* and not on rank \d": lambda s: s["model"].pop("plain"),
        "model.plain is torch.float32 .* and torch.float64": lambda s: s["model"].update(
            plain=s["model"]["plain"].double()
        ),
        r"groups.0.lr is 0.1 on rank 0 and 0.2 on rank \d": lambda s: s["groups"][0].update(lr=0.2),
        "model.ragged is .*RaggedShard": lambda s: s["model"].update(ragged=torch.ones(4, 3)),
    }
    for words, change in changes.items():
        state = make()
        if last:
            change(state)
        with pytest.raises(ValueError, match=f"so nothing was written: {words}"):
            check_alike(state, group)
    state = make()
    if last:
        state["model"]["extra"] = 3
    check_alike(state, group, same_keys=False)
    many = {"model": {f"key{i}": 1 for i in range(30 if last else 10)}}
    with pytest.raises(ValueError, match="and 10 more"):
        check_alike(many, group)


def test_ranks_hear_alike_what_differs(run_ranks):
    run_ranks(check_ranks, 2, exact=True)
