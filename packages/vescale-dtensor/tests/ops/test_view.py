# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import RaggedShard, distribute_tensor


def check_views(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    whole = torch.arange(96.0, device=DEVICE).view(8, 6, 2)
    x = distribute_tensor(whole, mesh, [RaggedShard((0,), (1, 0, 3))])
    for function, dims in (
        (lambda t: t.view(8, 12), (0,)),
        (lambda t: t.view(96), (0,)),
        (lambda t: t.flatten(), (0,)),
        (lambda t: t.reshape(4, -1), (0,)),
        (lambda t: t.reshape(2, 4, 12), (0, 1)),
        (lambda t: t.unsqueeze(0), (0, 1)),
        (lambda t: t.unsqueeze(1), (0,)),
        (lambda t: t.unsqueeze(-1), (0,)),
        (lambda t: t.view(8, 1, 12).squeeze(1), (0,)),
        (lambda t: t.view(1, 8, 12, 1).squeeze(), (0, 1)),
        (lambda t: t.view(1, 8, 12).squeeze((0, 2)), (0, 1)),
        (lambda t: t.view_as(t), (0,)),
        (lambda t: t.expand(8, 6, 2), (0,)),
        (lambda t: t.view(-1).view(8, 6, 2), (0,)),
    ):
        y, expected = function(x), function(whole)
        assert y.shape == expected.shape
        assert y.placements == (RaggedShard(dims, (1, 0, 3)),)
        assert y.to_local().data_ptr() == x.to_local().data_ptr()
        assert torch.equal(y.full_tensor(), expected)
    flat = distribute_tensor(whole, mesh, [RaggedShard((0, 1, 2), (5, 0, 91))])
    assert torch.equal((flat.view(48, 2) + 1).full_tensor(), whole.view(48, 2) + 1)
    one = distribute_tensor(whole, mesh, [RaggedShard((), (0, 0, 1))])
    assert one.view(96).placements == one.placements
    assert torch.equal(one.view(96).full_tensor(), whole.view(96))
    scalar = distribute_tensor(whole[0, 0, 1], mesh, [RaggedShard((), (0, 1, 0))])
    assert torch.equal(scalar.view(1, 1).full_tensor(), whole[:1, 0, 1:])
    assert torch.equal(scalar.view(1).view(()).full_tensor(), whole[0, 0, 1])
    empty = distribute_tensor(whole[:0], mesh, [RaggedShard((0,), (1, 1, 1))])
    assert empty.view(0, 12).full_tensor().shape == (0, 12)
    column = distribute_tensor(whole[:, :1].contiguous(), mesh, [RaggedShard((0,), (1, 0, 3))])
    wide = column.expand(8, 6, 2)
    assert wide.placements == column.placements
    assert torch.equal(wide.full_tensor(), whole[:, :1].expand(8, 6, 2))
    # A view sees writes to the tensor, and the other way round.
    x.view(8, 12).add_(1)
    assert torch.equal(x.full_tensor(), whole + 1)
    with pytest.raises(ValueError, match="does not hold"):
        x.view(5, 5)
    with pytest.raises(NotImplementedError, match="repeated"):
        column.expand(2, 8, 6, 2)
    with pytest.raises(NotImplementedError, match="repeated"):
        column.unsqueeze(0).expand(2, 8, 1, 2)


def check_views_beside_a_shard(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2))
    whole = torch.arange(48.0, device=DEVICE).view(8, 6)
    x = distribute_tensor(whole, mesh, [RaggedShard((0,), (1, 3)), Shard(1)])
    assert x.view(8, 6).placements == x.placements
    with pytest.raises(NotImplementedError, match="mixes with the Shard"):
        x.view(48)
    y = distribute_tensor(whole, mesh, [Replicate(), RaggedShard((0,), (1, 3))])
    assert torch.equal(y.view(4, 12).full_tensor(), whole.view(4, 12))


def test_views_keep_the_memory_and_the_ranges(run_ranks):
    run_ranks(check_views, 3, exact=True)


def test_a_view_across_another_axis_is_refused(run_ranks):
    run_ranks(check_views_beside_a_shard, 4, exact=True)
