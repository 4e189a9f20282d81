# SPDX-License-Identifier: Apache-2.0
"""The private names of torch still mean what this package takes them for."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale.legacy._torch_compat import (
    AsyncCollectiveTensor,
    DTensorSpec,
    ExplicitRedistributionContext,
    OpOverload,
    TensorMeta,
    TorchDispatchMode,
    _StridedShard,
    argument_names,
    as_process_group,
    compute_local_shape_and_global_offset,
    current_mesh,
    mesh_without_groups,
    top_dispatch_mode,
    tree_leaves,
    tree_map_only,
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


def test_specs_are_values(fake_world):
    fake_world(0, 4)
    mesh = init_device_mesh("cpu", (4,))
    meta = TensorMeta(torch.Size([8]), (1,), torch.float32)
    one, other = (DTensorSpec(mesh, (Shard(0),), tensor_meta=meta) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert DTensor.from_local(torch.ones(2), mesh, [Shard(0)])._spec == one


def test_the_current_mesh_is_that_of_the_block(fake_world):
    fake_world(0, 4)
    mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(RuntimeError, match="No device mesh is currently active"):
        current_mesh()
    with mesh:
        assert current_mesh() is mesh


def test_a_strided_shard_cuts_pieces_first(fake_world):
    fake_world(1, 2)
    mesh = init_device_mesh("cpu", (2,))
    placement = _StridedShard(0, split_factor=3)
    assert (placement.dim, placement.split_factor) == (0, 3)
    shape, _ = compute_local_shape_and_global_offset((12, 2), mesh, [placement])
    assert tuple(shape) == (6, 2)
    x = DTensor.from_local(torch.ones(6, 2), mesh, [placement])
    assert x.shape == (12, 2)
    assert (x * 2).placements == (placement,)


def test_silent_resharding_can_be_refused(fake_world):
    fake_world(0, 2)
    x = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    with (
        pytest.raises(RuntimeError, match=r"^Implicit redistribution"),
        ExplicitRedistributionContext(mode="raise"),
    ):
        torch.relu(x)


def test_asynchronous_results_can_be_waited_for(fake_world):
    fake_world(0, 2)
    x = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    late = x.redistribute(placements=[Replicate()], async_op=True).to_local()
    assert isinstance(late, AsyncCollectiveTensor)
    assert type(late.wait()) is torch.Tensor


def test_trees_are_mapped_by_type():
    assert tree_map_only(int, lambda x: x + 1, {"a": [1, "b"], "c": (2,)}) == {
        "a": [2, "b"],
        "c": (3,),
    }
    assert tree_leaves({"a": [1, None], "c": (2,)}) == [1, None, 2]
