# SPDX-License-Identifier: Apache-2.0
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale.fsdp.data_mesh import DataMesh, data_mesh_of


@pytest.mark.parametrize("rank", [0, 7, 11])
def test_a_mesh_of_two_axes_repeats_over_the_first(fake_group, rank):
    fake_group(12, rank)
    data = data_mesh_of(init_device_mesh("cpu", (3, 4)))
    assert (data.shards, data.replicas, data.ranks) == (4, 3, 12)
    assert data.placements(Shard(1)) == (Replicate(), Shard(1))
    assert data.shard_group.rank() == rank % 4
    assert data.replicate_group.rank() == rank // 4
    assert data.groups == [data.shard_group, data.replicate_group]
    # Ranks of both groups give the order of the mesh: shards change fastest.
    members = [dist.get_process_group_ranks(group) for group in data.groups]
    assert members == [[rank // 4 * 4 + i for i in range(4)], [rank % 4 + 4 * i for i in range(3)]]


def test_a_mesh_of_one_axis_shards(fake_group):
    fake_group(12)
    mesh = init_device_mesh("cpu", (12,))
    data = data_mesh_of(mesh)
    assert (data.shards, data.replicas, data.ranks) == (12, 1, 12)
    assert data.placements(Shard(0)) == (Shard(0),)
    assert data.replicate_group is None
    assert data.groups == [data.shard_group]
    assert data == data_mesh_of(mesh)
    whole = DataMesh(mesh, shard_axis=None, replicate_axis=0)
    assert (whole.shards, whole.replicas, whole.ranks) == (1, 12, 12)
    assert whole.placements(Shard(0)) == (Replicate(),)
    assert whole.groups == [whole.replicate_group]
