# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import RaggedShard, distribute_tensor, zeros
from vescale.dtensor.debug import CommDebugMode, sharding_table, visualize_sharding


def test_the_mode_counts_collectives_of_ragged_and_plain_tensors(fake_group):
    fake_group(2)
    mesh = init_device_mesh(DEVICE, (2,))
    x = zeros(4, 2, device_mesh=mesh, placements=[RaggedShard((0,), (1, 1))])
    y = zeros(4, 2, device_mesh=mesh, placements=[Shard(0)])
    with CommDebugMode() as mode:
        x + x
        x.sum()
        x.redistribute(mesh, [Shard(0)])
        y.redistribute(mesh, [Replicate()])
    counts = {str(name).split(".")[-1]: n for name, n in mode.get_comm_counts().items()}
    assert counts == {"allreduce_": 1, "alltoall_base_": 1, "all_gather_into_tensor": 1}


TABLE = """\
rank  coordinate  elements  part
0     (0, 0)      6         [0:2, 0:3]
1     (0, 1)      6         [0:2, 3:6]
2     (1, 0)      18        [2:8, 0:3]
3     (1, 1)      18        [2:8, 3:6]"""


def test_the_table_shows_the_part_of_every_rank(fake_group, capsys):
    fake_group(4)
    mesh = init_device_mesh(DEVICE, (2, 2))
    x = zeros(8, 6, device_mesh=mesh, placements=[RaggedShard((0,), (1, 3)), Shard(1)])
    assert sharding_table(x) == TABLE
    visualize_sharding(x, header="a weight")
    assert capsys.readouterr().out == f"a weight\n{TABLE}\n"
    line = init_device_mesh(DEVICE, (4,))
    y = zeros(4, 6, device_mesh=line, placements=[RaggedShard((0, 1), (8, 0, 3, 13))])
    rows = sharding_table(y).splitlines()[1:]
    assert rows[0].endswith("[0:1, 0:6] + [1:2, 0:2]")
    assert rows[1].endswith("nothing")
    assert rows[3].endswith("[1:2, 5:6] + [2:4, 0:6]")
    pytest.importorskip("rich")
    visualize_sharding(x, use_rich=True)
    assert "[2:8, 3:6]" in capsys.readouterr().out


def test_other_ranks_print_nothing(fake_group, capsys):
    fake_group(2, rank=1)
    mesh = init_device_mesh(DEVICE, (2,))
    visualize_sharding(zeros(4, device_mesh=mesh, placements=[RaggedShard((0,), (1, 1))]))
    assert capsys.readouterr().out == ""


def test_plain_placements_are_drawn_by_torch(fake_group, capsys):
    fake_group(2)
    mesh = init_device_mesh(DEVICE, (2,))
    x = distribute_tensor(torch.ones(4, 4, device=DEVICE), mesh, [Shard(0)], src_data_rank=None)
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    visualize_sharding(x, use_rich=True)
    assert capsys.readouterr().out
