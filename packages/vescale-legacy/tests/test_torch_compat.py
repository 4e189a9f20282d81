# SPDX-License-Identifier: Apache-2.0
"""The private names of torch still mean what this package takes them for."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vescale.legacy._torch_compat import (
    OpOverload,
    TorchDispatchMode,
    argument_names,
    as_process_group,
    mesh_without_groups,
    top_dispatch_mode,
)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def test_a_mesh_without_groups_creates_none(fake_world):
    fake_world(3, 8)
    before = dist.distributed_c10d._world.group_count
    inside = mesh_without_groups("cpu", torch.tensor([[0, 1], [2, 3]]), ("DP", "TP"))
    outside = mesh_without_groups("cpu", torch.tensor([[4, 5], [6, 7]]).t(), ("DP", "TP"))
    assert dist.distributed_c10d._world.group_count == before
    assert tuple(inside.get_coordinate()) == (1, 1)
    assert outside.get_coordinate() is None
    assert outside.mesh.tolist() == [[4, 6], [5, 7]]
    with pytest.raises(RuntimeError, match="process groups not initialized!"):
        outside.get_group("TP")


def test_the_group_of_a_functional_collective_is_found(fake_world):
    fake_world(0, 4)
    group = init_device_mesh("cpu", (2, 2)).get_group(1)
    with Seen() as seen:
        out = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group.group_name)
    torch.ops._c10d_functional.wait_tensor(out)
    [(func, args)] = [call for call in seen.calls if call[0].namespace == "_c10d_functional"]
    assert argument_names(func)[2] == "group_name"
    assert as_process_group(args[2]) is group
    assert as_process_group(group) is group


def test_the_group_of_a_direct_collective_is_found(fake_world):
    fake_world(0, 4)
    group = init_device_mesh("cpu", (2, 2)).get_group(1)
    with Seen() as seen:
        dist.all_reduce(torch.ones(2), group=group)
    [(func, args)] = [call for call in seen.calls if call[0].namespace == "c10d"]
    assert argument_names(func)[1] == "process_group"
    assert dist.get_process_group_ranks(as_process_group(args[1])) == [0, 1]


def test_the_top_mode_is_the_one_entered_last():
    assert top_dispatch_mode() is None
    with Seen() as outer:
        assert top_dispatch_mode() is outer
        with Seen() as inner:
            assert top_dispatch_mode() is inner
        assert top_dispatch_mode() is outer
    assert top_dispatch_mode() is None


def test_operators_are_known_by_their_type():
    assert isinstance(torch.ops.aten.mm.default, OpOverload)
    assert not isinstance(torch.ops.aten.mm, OpOverload)
    assert argument_names(torch.ops.aten.mm.default) == ["self", "mat2"]
