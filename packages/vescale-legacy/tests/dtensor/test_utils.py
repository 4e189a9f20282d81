# SPDX-License-Identifier: Apache-2.0
"""Shapes of parts and of wholes, by the old functions."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from testing.ranks import DEVICE
from vescale.legacy.dtensor import InterleavedShard, Partial, Replicate, Shard, distribute_tensor
from vescale.legacy.dtensor._utils import (
    compute_global_stride,
    compute_global_tensor_info,
    compute_local_offset,
    compute_local_shape,
    compute_local_shape_and_global_offset,
    gather_local_tensor_shape,
    is_zero_out_local_shard,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@pytest.mark.parametrize(
    ("rank", "shape", "placements", "expected"),
    [
        (0, (7, 4), [S0, R], ((4, 4), (0, 0))),
        (2, (7, 4), [S0, R], ((3, 4), (4, 0))),
        (3, (7, 4), [S0, S0], ((1, 4), (6, 0))),
        (3, (7, 5), [S0, S1], ((3, 2), (4, 3))),
        (3, (1, 5), [S0, P], ((0, 5), (1, 0))),
        (1, (8, 5), [R, InterleavedShard(0, 2)], ((4, 5), (2, 0))),
    ],
)
def test_parts_of_a_two_by_two_mesh(fake_world, rank, shape, placements, expected):
    fake_world(rank, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    assert compute_local_shape_and_global_offset(shape, mesh, placements) == expected
    assert compute_local_shape(shape, mesh, placements) == expected[0]
    assert compute_local_offset(shape, mesh, placements) == expected[1]


def test_the_whole_of_even_parts(fake_world):
    fake_world(1, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    part = torch.ones(3, 2)
    assert compute_global_tensor_info(part, mesh, [S0, S1]) == ([6, 4], [4, 1])
    assert compute_global_tensor_info(part.t(), mesh, [R, S0]) == ([4, 3], [1, 4])
    assert compute_global_stride(part, mesh, [S1, S1]) == (8, 1)
    assert is_zero_out_local_shard(mesh, [R, P])
    assert not is_zero_out_local_shard(mesh, [P, S0])


def check_gathered(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2))
    part = distribute_tensor(torch.ones(5, 3, device=DEVICE), mesh, [S0, S1]).to_local()
    found = gather_local_tensor_shape(part, mesh, [S0, S1])
    row = part.size(1)
    assert [tuple(shape) for shape in found[0]] == [(3, row), (2, row)]
    assert [tuple(shape) for shape in found[1]] == [(part.size(0), 2), (part.size(0), 1)]
    assert compute_global_tensor_info(part, mesh, [S0, S1], found) == ([5, 3], [3, 1])
    assert list(gather_local_tensor_shape(part, mesh, [R, S1], shard_only=True)) == [1]


def test_the_whole_of_uneven_parts(run_ranks):
    run_ranks(check_gathered, 4, exact=True)
