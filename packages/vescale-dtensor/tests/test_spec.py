# SPDX-License-Identifier: Apache-2.0
import copy
import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from testing.ranks import DEVICE
from vescale.dtensor._torch_compat import DTensorSpec
from vescale.dtensor.placement import RaggedShard, _StridedRaggedShard
from vescale.dtensor.spec import (
    LAYOUT,
    base_block,
    layout_of,
    make_spec,
    normalize_placements,
    ragged_spec,
    replicated_spec,
    spec_with_dtype,
    without_caches,
)


def test_a_spec_carries_the_layout_of_this_rank(fake_group):
    fake_group(4, rank=2)
    mesh = init_device_mesh(DEVICE, (4,))
    spec = ragged_spec(mesh, [RaggedShard((0,), (1, 3, 2, 2))], (8, 6), torch.float32)
    layout = layout_of(spec)
    assert (layout.start, layout.end, layout.block_shape) == (24, 36, (2, 6))
    assert layout_of(spec) is layout
    assert spec.tensor_meta.stride == (6, 1)
    other = spec_with_dtype(spec, torch.bfloat16)
    assert other.tensor_meta.dtype == torch.bfloat16
    assert spec.tensor_meta.dtype == torch.float32
    assert other != spec
    assert layout_of(other) is layout
    assert spec_with_dtype(other, torch.float32) == spec
    clean = without_caches(spec)
    assert LAYOUT not in vars(clean)
    assert clean == spec
    assert layout_of(clean) is layout
    assert layout_of(copy.deepcopy(spec)) is layout
    assert layout_of(make_spec(mesh, [Shard(0)], (8, 6), torch.float32)) is None
    scalar = replicated_spec(spec, (), (), torch.float32)
    assert scalar is replicated_spec(spec, (), (), torch.float32)
    assert scalar.placements == (Replicate(),)
    assert replicated_spec(spec, (2,), (1,), torch.int64).tensor_meta.shape == (2,)


def test_the_ragged_cut_comes_after_the_other_placements(fake_group):
    fake_group(4, rank=3)
    mesh = init_device_mesh(DEVICE, (2, 2))
    ragged = RaggedShard((0,), (1, 3))
    layout = layout_of(ragged_spec(mesh, [ragged, Shard(0)], (16, 6), torch.float32))
    assert (layout.base_shape, layout.base_offset) == ((8, 6), (8, 0))
    assert (layout.start, layout.end) == (12, 48)
    assert not layout.pending
    strided = _StridedRaggedShard((0,), (1, 3), split_factor=2)
    other = layout_of(ragged_spec(mesh, [strided, Shard(0)], (16, 6), torch.float32))
    assert (other.start, other.end, other.base_offset) == (12, 48, (8, 0))
    assert layout_of(ragged_spec(mesh, [ragged, Partial()], (16, 6), torch.float32)).pending
    layout = layout_of(ragged_spec(mesh, [Shard(-1), ragged], (16, 6), torch.float32))
    assert (layout.base_shape, layout.axis) == ((16, 3), 1)


def test_a_rank_outside_of_the_mesh_holds_nothing(fake_group):
    fake_group(4, rank=3)
    mesh = torch.distributed.device_mesh.DeviceMesh(DEVICE, [0, 1])
    layout = layout_of(ragged_spec(mesh, [RaggedShard((0,), (1, 3))], (8, 6), torch.float32))
    assert (layout.numel, layout.block_shape, layout.boxes) == (0, (0, 6), ())


def test_mistakes_are_found_when_the_spec_is_made(fake_group):
    fake_group(4)
    line, square = init_device_mesh(DEVICE, (4,)), init_device_mesh(DEVICE, (2, 2))

    def spec(mesh, placements, shape=(8, 6), stride=None):
        return ragged_spec(mesh, placements, shape, torch.float32, stride)

    with pytest.raises(ValueError, match=r"2 units, but mesh axis 0 has 4 ranks"):
        spec(line, [RaggedShard((0,), (1, 1))])
    with pytest.raises(ValueError, match=r"mesh axes \[0, 1\]; use one RaggedShard"):
        spec(square, [RaggedShard((0,), (1, 1)), RaggedShard((0,), (1, 1))])
    with pytest.raises(ValueError, match=r"8 rows.*not a multiple"):
        spec(line, [RaggedShard((0,), (1, 1, 1, 2))])
    with pytest.raises(ValueError, match=r"cuts dims \(0, 1\)"):
        spec(line, [RaggedShard((0, 1), (1, 1, 1, 1))], (8,))
    with pytest.raises(ValueError, match="got 1 placements"):
        spec(square, [RaggedShard((0,), (1, 1))])
    with pytest.raises(ValueError, match="out of range for a 2-D tensor"):
        spec(square, [RaggedShard((0,), (1, 1)), Shard(2)])
    with pytest.raises(TypeError, match="expected placements"):
        spec(line, ["ragged"])
    with pytest.raises(ValueError, match="row-major"):
        spec(line, [RaggedShard((0,), (1, 1, 1, 1))], stride=(1, 8))
    strided = torch.distributed.tensor.placement_types._StridedShard(0, split_factor=2)
    with pytest.raises(ValueError, match=r"leave \(3, 4\) of \(5, 4\) on this rank: 3 rows"):
        spec(square, [RaggedShard((0,), (1, 1)), Shard(0)], (5, 4))
    assert layout_of(spec(square, [RaggedShard((0,), (1, 2)), Shard(0)], (5, 4))).numel == 4
    with pytest.raises(NotImplementedError, match="cannot be combined"):
        spec(square, [RaggedShard((0,), (1, 1)), strided])


def test_placements_are_normalized(fake_group):
    fake_group(2)
    mesh = init_device_mesh(DEVICE, (2,))
    assert normalize_placements(None, mesh, 2) == (Replicate(),)
    assert normalize_placements([Shard(-1)], mesh, 3) == (Shard(2),)


@pytest.mark.parametrize("rank", range(4))
def test_base_block_is_what_torch_cuts(fake_group, rank):
    fake_group(4, rank=rank)
    mesh = init_device_mesh(DEVICE, (2, 2))
    whole = torch.arange(35, device=DEVICE).view(7, 5)
    for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2):
        block, offset = base_block((7, 5), placements, (2, 2), mesh.get_coordinate())
        local = torch_distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        assert block == local.shape
        rows, columns = (slice(o, o + n) for o, n in zip(offset, block, strict=True))
        assert torch.equal(whole[rows, columns], local)


def test_a_layout_of_ten_thousand_ranks_lists_none_of_them(fake_group):
    fake_group(10240, rank=77)
    mesh = init_device_mesh(DEVICE, (10240,))
    units = [rank // 50 % 2 for rank in range(10240)]
    spec = ragged_spec(mesh, [RaggedShard((0,), units)], (sum(units), 3), torch.float32)
    layout = layout_of(spec)
    assert (layout.start, layout.end) == (3 * sum(units[:77]), 3 * sum(units[:78]))
    assert layout.split_numels == tuple(3 * count for count in units)
    assert max(len(value) for value in vars(layout).values() if isinstance(value, tuple)) == 2
    assert isinstance(spec, DTensorSpec)
