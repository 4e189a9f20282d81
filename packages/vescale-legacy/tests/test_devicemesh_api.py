# SPDX-License-Identifier: Apache-2.0
"""The coordinate tables of the old API on a fake world, then real groups on gloo ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard

from testing.ranks import DEVICE
from vescale.legacy.devicemesh_api import VESCALE_DEVICE_MESH, VeDeviceMesh
from vescale.legacy.devicemesh_api.api import VESCALE_DEVICE_MESH as BY_OLD_FILE


def ranks_of(group):
    return dist.get_process_group_ranks(group)


# Before and at initialization.


def test_one_object_for_the_process():
    assert isinstance(VESCALE_DEVICE_MESH, VeDeviceMesh)
    assert BY_OLD_FILE is VESCALE_DEVICE_MESH


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
@pytest.mark.parametrize(
    "ask",
    [
        VeDeviceMesh.get,
        VeDeviceMesh.get_local_rank,
        VeDeviceMesh.is_first_stage,
        VeDeviceMesh.size,
        lambda mesh: mesh["TP"],
        lambda mesh: mesh.shape,
    ],
)
def test_without_a_mesh_every_question_says_what_to_do(ask, error):
    with pytest.raises(error, match="initialize global DeviceMesh"):
        ask(VeDeviceMesh())


def test_without_a_mesh_there_are_no_names():
    mesh = VeDeviceMesh()
    assert mesh._MESH_DIM_NAMES_MAPPING == {}
    assert mesh._MESH_DIM_NAMES_LOOKUP == {}


@pytest.mark.parametrize(
    ("shape", "names"), [((8,), ("TP",)), ((2, 4), ("DP", "TP")), ((2, 2, 2), ("PP", "DP", "TP"))]
)
def test_default_names_are_the_last_strategies(fake_world, shape, names):
    fake_world(0, 8)
    mesh = VeDeviceMesh()
    made = mesh.init_device_mesh("cpu", shape)
    assert isinstance(made, DeviceMesh)
    assert made.mesh_dim_names == names
    assert mesh.get() is made
    assert (mesh.ndim, mesh.shape, mesh.size()) == (len(shape), list(shape), 8)
    assert [mesh.size(dim) for dim in range(mesh.ndim)] == list(shape)
    assert dict(enumerate(names)) == mesh._MESH_DIM_NAMES_MAPPING
    assert {name: index for index, name in enumerate(names)} == mesh._MESH_DIM_NAMES_LOOKUP


def test_initializing_again_replaces_the_mesh_unless_uniqueness_is_asked(fake_world):
    fake_world(0, 8)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (8,), check_uniqueness=True)
    with pytest.raises(ValueError, match="check_uniqueness"):
        mesh.init_device_mesh("cpu", (2, 4), check_uniqueness=True)
    assert mesh.shape == [8]
    mesh.init_device_mesh("cpu", (2, 4))
    assert mesh.shape == [2, 4]


def test_get_initializes_once(fake_world):
    fake_world(0, 4)
    mesh = VeDeviceMesh()
    made = mesh.get(device_type="cpu", mesh_shape=(2, 2), mesh_dim_names=("PP", "TP"))
    assert made.mesh_dim_names == ("PP", "TP")
    assert mesh.get(device_type="cpu", mesh_shape=(4,)) is made


def test_a_device_index_is_dropped_with_a_warning(fake_world):
    fake_world(0, 4)
    with pytest.warns(UserWarning, match="cuda:0") as caught:
        made = VeDeviceMesh().init_device_mesh("cuda:0", (4,))
    assert made.device_type == "cuda"
    assert caught[0].filename == __file__


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "meta"])
def test_three_device_types_are_taken(fake_world, device_type):
    fake_world(3, 4)
    assert VeDeviceMesh().init_device_mesh(device_type, (2, 2)).device_type == device_type


@pytest.mark.parametrize("error", [ValueError, AssertionError])
@pytest.mark.parametrize(
    ("device_type", "shape", "text"),
    [
        ("xpu", (4,), "expected one of"),
        ("cpu", (), "1 to 3"),
        ("cpu", (1, 1, 2, 2), "1 to 3"),
        ("cpu", (4, 0), "positive int"),
        ("cpu", (2.0, 2), "positive int"),
    ],
)
def test_a_wrong_mesh_is_refused_and_the_old_one_kept(fake_world, device_type, shape, text, error):
    fake_world(0, 4)
    mesh = VeDeviceMesh()
    before = mesh.init_device_mesh("cpu", (4,))
    with pytest.raises(error, match=text):
        mesh.init_device_mesh(device_type, shape)
    assert mesh.get() is before


@pytest.mark.parametrize(
    ("shape", "names", "text"),
    [((2, 2), ("DP", "DP"), "unique"), ((2, 2), ("DP",), "same length"), ((8,), None, "bigger")],
)
def test_torch_refuses_what_does_not_fit_together(fake_world, shape, names, text):
    fake_world(0, 4)
    with pytest.raises(RuntimeError, match=text):
        VeDeviceMesh().init_device_mesh("cpu", shape, mesh_dim_names=names)


# Coordinates.

shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes, data=st.data())
def test_coordinates_are_row_major(fake_world, shape, data):
    coordinates = list(itertools.product(*map(range, shape)))
    rank = data.draw(st.integers(0, len(coordinates) - 1))
    other = data.draw(st.integers(0, len(coordinates) - 1))
    fake_world(rank, len(coordinates))
    mesh = VeDeviceMesh()
    names = mesh.init_device_mesh("cpu", shape).mesh_dim_names
    mine = coordinates[rank]
    assert mesh.get_coordinate() == mesh.get_strategy_coordinate() == list(mine)
    assert mesh.get_strategy_coordinate(other) == list(coordinates[other])
    for index, name in enumerate(names):
        assert mesh.lookup_rank(index) == mesh.lookup_rank(name) == mine[index]
        assert mesh.lookup_rank(index - len(shape)) == mine[index]
        assert mesh.get_strategy_size(index) == mesh.get_strategy_size(name) == shape[index]
        line = [
            peer
            for peer, place in enumerate(coordinates)
            if place[:index] == mine[:index] and place[index + 1 :] == mine[index + 1 :]
        ]
        assert mesh[name].mesh.tolist() == line
        assert ranks_of(mesh[name].get_group()) == line


def test_a_wrong_axis_or_rank_names_the_right_ones(fake_world):
    fake_world(0, 4)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (2, 2))
    for dim in ("PP", 2, -3):
        with pytest.raises(ValueError, match="is no axis"):
            mesh.lookup_rank(dim)
        with pytest.raises(ValueError, match="is no axis"):
            mesh.get_strategy_size(dim)
    with pytest.raises(ValueError, match=r"holds \[0, 1, 2, 3\]"):
        mesh.get_strategy_coordinate(4)
    with pytest.raises(KeyError):
        mesh["PP"]


def test_a_rank_outside_the_mesh_has_no_coordinate(fake_world):
    fake_world(3, 4)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (2,))
    assert mesh.get_coordinate() is None
    with pytest.raises(ValueError, match="rank 3 is not on"):
        mesh.get_tensor_parallel_rank()


def test_local_rank_counts_eight_to_a_host_without_devices(fake_world):
    fake_world(13, 16)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (16,))
    assert mesh.get_local_rank() == 5


def test_local_rank_counts_devices_where_there_are_some(fake_world, monkeypatch):
    fake_world(13, 16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cuda", (16,))
    assert mesh.get_local_rank() == 1


# Strategies: the table of the old API.


@pytest.mark.parametrize("rank", range(8))
def test_three_strategies_on_three_axes(fake_world, rank):
    fake_world(rank, 8)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (2, 2, 2))
    pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
    assert mesh.get_pipeline_parallel_rank() == pp
    assert mesh.get_data_parallel_rank() == dp
    assert mesh.get_tensor_parallel_rank() == tp
    assert mesh.is_first_stage() == (pp == 0)
    assert mesh.is_last_stage() == (pp == 1)
    assert mesh.get_data_parallel_mesh() == mesh["DP"]
    assert mesh.get_tensor_parallel_mesh() == mesh["TP"]
    assert mesh.get_pipeline_parallel_mesh().mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert ranks_of(mesh.get_tensor_parallel_group()) == mesh["TP"].mesh.tolist()


def test_two_axes_are_data_and_tensor_parallel(fake_world):
    fake_world(6, 8)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (2, 4))
    assert (mesh.get_data_parallel_rank(), mesh.get_tensor_parallel_rank()) == (1, 2)
    for ask in (mesh.get_pipeline_parallel_rank, mesh.is_first_stage, mesh.is_last_stage):
        with pytest.raises(AssertionError, match="no axis PP"):
            ask()


def test_two_axes_may_have_a_pipeline(fake_world):
    fake_world(6, 8)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (4, 2), mesh_dim_names=("PP", "TP"))
    assert mesh.get_pipeline_parallel_rank() == 3
    assert mesh.is_last_stage()
    assert mesh.get_data_parallel_rank() == 0
    with pytest.raises(ValueError, match="no axis DP"):
        mesh.get_data_parallel_mesh()
    stages = mesh.get_global_pipeline_parallel_meshes("cpu")
    assert [stage.mesh.tolist() for stage in stages] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks_of(stages[3].get_group()) == [6, 7]


def test_one_axis_is_one_stage(fake_world):
    fake_world(2, 4)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (4,))
    assert mesh.get_tensor_parallel_rank() == 2
    assert mesh.get_pipeline_parallel_rank() == mesh.get_data_parallel_rank() == 0
    assert mesh.is_first_stage()
    assert mesh.is_last_stage()
    assert mesh["TP"] is mesh.get()


def test_custom_names_serve_everything_but_strategies(fake_world):
    fake_world(3, 4)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "tp"))
    assert mesh.lookup_rank("outer") == 1
    assert mesh["tp"].mesh.tolist() == [2, 3]
    assert mesh.get_pipeline_parallel_mesh() == mesh["tp"]
    for ask in (
        mesh.get_tensor_parallel_rank,
        mesh.get_data_parallel_rank,
        mesh.get_pipeline_parallel_rank,
        mesh.get_tensor_parallel_mesh,
        mesh.get_tensor_parallel_group,
        mesh.get_global_pipeline_parallel_meshes,
        mesh.is_last_stage,
    ):
        with pytest.raises(ValueError, match=r"\['outer', 'tp'\]"):
            ask()


@pytest.mark.parametrize(
    ("shape", "rank", "tp", "dp"),
    [((2, 1, 4), 4, [0, 4], [4]), ((4, 2), 0, [0, 2, 4, 6], [0, 2, 4, 6]), ((8,), 3, None, None)],
)
def test_dim_groups_go_by_position_as_they_always_did(fake_world, shape, rank, tp, dp):
    fake_world(rank, 8)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", shape)
    everyone = list(range(8))
    assert ranks_of(mesh.get_tensor_parallel_dim_groups()) == (tp or everyone)
    assert ranks_of(mesh.get_data_parallel_dim_groups()) == (dp or everyone)


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_stages_of_a_pipeline(fake_world, rank):
    fake_world(rank, 8)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (4, 1, 2))
    stages = mesh.get_global_pipeline_parallel_meshes(device_type="cpu")
    assert [stage.mesh.tolist() for stage in stages] == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert all(stage.mesh_dim_names == ("DP", "TP") for stage in stages)
    lines = mesh.get_global_tensor_parallel_meshes()
    assert [line.mesh.tolist() for line in lines] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for number, (stage, line) in enumerate(zip(stages, lines, strict=True)):
        if number == rank // 2:
            assert stage["TP"] == line == mesh["TP"]
            assert ranks_of(stage.get_group("TP")) == [2 * number, 2 * number + 1]
        else:
            assert stage.get_coordinate() is line.get_coordinate() is None
            for other in (stage.get_all_groups, line.get_group):
                with pytest.raises(RuntimeError, match="process groups not initialized!"):
                    other()


def test_stages_for_another_device_type_keep_their_groups(fake_world):
    fake_world(5, 8)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (2, 2, 2))
    stages = mesh.get_global_pipeline_parallel_meshes()
    assert [stage.device_type for stage in stages] == ["cuda", "cuda"]
    assert stages[1].mesh.tolist() == [[4, 5], [6, 7]]
    assert stages[1].get_group("TP") is mesh["TP"].get_group()
    mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("PP", "TP"))
    stage = mesh.get_global_pipeline_parallel_meshes("meta")[1]
    assert (stage.device_type, stage.mesh.tolist()) == ("meta", [4, 5, 6, 7])
    assert stage.get_group() is mesh["TP"].get_group()


def test_tensor_parallel_meshes_follow_the_data_parallel_place(fake_world):
    fake_world(6, 8)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("DP", "PP", "TP"))
    lines = mesh.get_global_tensor_parallel_meshes()
    assert [line.mesh.tolist() for line in lines] == [[4, 5], [6, 7]]
    assert lines[1] == mesh["TP"]


def test_stages_need_the_axes_they_speak_of(fake_world):
    fake_world(0, 4)
    mesh = VeDeviceMesh()
    mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("PP",))
    with pytest.raises(ValueError, match="a stage is one rank"):
        mesh.get_global_pipeline_parallel_meshes("cpu")
    mesh.init_device_mesh("cpu", (2, 2))
    with pytest.raises(ValueError, match="no axis PP"):
        mesh.get_global_pipeline_parallel_meshes("cpu")
    with pytest.raises(ValueError, match="expected PP, DP and TP"):
        mesh.get_global_tensor_parallel_meshes()


# Real groups, of as many ranks as there are.


def tensor_parallel_size(world_size):
    return 1 if world_size % 2 else 2


def build_mlp():
    torch.manual_seed(0)
    layers = [
        torch.nn.LayerNorm(8),
        torch.nn.Linear(8, 16),
        torch.nn.GELU(),
        torch.nn.Linear(16, 8),
    ]
    return torch.nn.Sequential(*layers).to(DEVICE)


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 4, 8, generator=generator).to(DEVICE)  # [batch, sequence, features]


def rolled(data):
    """Return the target; made before sharding, since torch 2.11 rolls no DTensor."""
    return data.roll(1, -1)


def train(model, data, target, after_backward=lambda: None):
    """Return the losses of four steps; each is the mean over ``data``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(data) - target).square().mean()
        loss.backward()
        after_backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def mean_over(losses, group):
    dist.all_reduce(losses, group=group)
    return losses / group.size()


def average_gradients(model, group):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.to_local(), group=group)
        parameter.grad.to_local().div_(group.size())


def check_training_on_child_meshes(rank, world_size):
    data = batch()
    expected = train(build_mlp(), data, rolled(data))

    VESCALE_DEVICE_MESH.init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("DP",))
    mesh = VESCALE_DEVICE_MESH.get_data_parallel_mesh()
    model = torch.nn.parallel.DistributedDataParallel(build_mlp(), device_mesh=mesh)
    mine = data.chunk(world_size)[VESCALE_DEVICE_MESH.get_data_parallel_rank()]
    losses = mean_over(
        train(model, mine, rolled(mine)), VESCALE_DEVICE_MESH.get_data_parallel_dim_groups()
    )
    torch.testing.assert_close(losses, expected)

    # DP x TP with sequence parallel activations.
    tp = tensor_parallel_size(world_size)
    VESCALE_DEVICE_MESH.init_device_mesh(DEVICE, (world_size // tp, tp))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    mesh, group = VESCALE_DEVICE_MESH["TP"], VESCALE_DEVICE_MESH.get_data_parallel_dim_groups()
    model = parallelize_module(build_mlp(), mesh, plan)
    mine = data.chunk(world_size // tp)[VESCALE_DEVICE_MESH.lookup_rank("DP")]
    sharded, target = (distribute_tensor(x, mesh, [Shard(1)]) for x in (mine, rolled(mine)))
    losses = train(model, sharded, target, lambda: average_gradients(model, group)).full_tensor()
    torch.testing.assert_close(mean_over(losses, group), expected)


def test_losses_equal_one_process(run_ranks):
    run_ranks(check_training_on_child_meshes, 4)


def check_stages(rank, world_size):
    mesh, tp = VESCALE_DEVICE_MESH, tensor_parallel_size(world_size)
    mesh.init_device_mesh(DEVICE, (world_size // tp, 1, tp))
    # No collective: a rank may ask alone.
    if rank == world_size - 1:
        assert len(mesh.get_global_pipeline_parallel_meshes(DEVICE)) == world_size // tp
    dist.barrier()
    stages = mesh.get_global_pipeline_parallel_meshes(DEVICE)
    stage = stages[mesh.get_pipeline_parallel_rank()]
    peers = [peer for peer in range(world_size) if peer // tp == rank // tp]
    assert stage.mesh.tolist() == [peers]
    full = torch.arange(6.0, device=DEVICE).view(2, 3)
    dtensor = distribute_tensor(full, stage, [Replicate(), Shard(0)])
    torch.testing.assert_close(dtensor.to_local(), full.chunk(tp)[rank % tp])
    torch.testing.assert_close(dtensor.full_tensor(), full)
    mine = torch.tensor([float(rank)], device=DEVICE)
    dist.all_reduce(mine, group=mesh.get_tensor_parallel_group())
    assert mine.item() == sum(peers)
    own_line = mesh.get_global_tensor_parallel_meshes()[mesh.get_pipeline_parallel_rank()]
    assert own_line.get_group() is mesh.get_tensor_parallel_group()
    assert mesh.get_local_rank() == rank


def test_the_stage_of_a_rank_has_working_groups(run_ranks):
    run_ranks(check_stages, 4)
