# SPDX-License-Identifier: Apache-2.0
"""Children of a mesh and ranks of another, on a fake world."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.legacy.dtensor.device_mesh import (
    get_all_submesh,
    get_dim_groups,
    get_mapping_rank,
    get_submesh,
    init_device_mesh,
    ndevice,
)


def test_children(fake_world):
    fake_world(5, 8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("PP", "DP", "TP"))
    assert ndevice(mesh) == 8
    assert get_submesh(mesh, "TP").mesh.tolist() == [4, 5]
    assert get_submesh(mesh, ["PP", 2]).mesh.tolist() == [[0, 1], [4, 5]]
    lines = get_all_submesh(mesh, "DP")
    assert [line.mesh.tolist() for line in lines] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dist.get_process_group_ranks(lines[3].get_group()) == [5, 7]
    assert dist.get_process_group_ranks(get_dim_groups(mesh, "PP")) == [1, 5]
    assert len(get_dim_groups(mesh)) == 3
    with pytest.raises(KeyError, match="no dim of"):
        get_submesh(mesh, "EP")
    with pytest.raises(KeyError, match="no names"):
        get_submesh(init_device_mesh("cpu", (8,)), [0])


def test_ranks_of_another_mesh(fake_world):
    fake_world(1, 6)
    one = init_device_mesh("cpu", (6,))

    def over(*ranks):
        return DeviceMesh("cpu", list(ranks), _init_backend=False)

    two = over(0, 1)
    assert get_mapping_rank(two, over(4, 5)) == 5
    assert get_mapping_rank(two, one) == [3, 4, 5]
    assert get_mapping_rank(one, over(4, 5)) == {1: 4}
    with pytest.raises(RuntimeError, match="do not map"):
        get_mapping_rank(two, over(3, 4, 5))
    with pytest.raises(ValueError, match="is not on"):
        get_mapping_rank(over(4, 5), two)
