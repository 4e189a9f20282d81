# SPDX-License-Identifier: Apache-2.0
import itertools
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

import vescale.dtensor as vd
from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor
from vescale.dtensor.debug import CommDebugMode
from vescale.dtensor.tensor import adopt

UNITS = {1: (4,), 2: (1, 3), 3: (1, 0, 3), 4: (2, 0, 1, 1)}


def numbers(*shape):
    return torch.arange(float(torch.Size(shape).numel()), device=DEVICE).view(shape)


def check_distribute(rank, world_size):
    mesh, whole, units = init_device_mesh(DEVICE, (world_size,)), numbers(8, 6), UNITS[world_size]
    ragged, first, rows = [RaggedShard((0,), units)], 2 * sum(units[:rank]), 2 * units[rank]
    for source in range(world_size):
        tensor = whole if rank == source else torch.full_like(whole, -1)
        with CommDebugMode() as mode:
            x = distribute_tensor(tensor, mesh, ragged, src_data_rank=source)
        assert mode.get_total_counts() == 1
        assert torch.equal(x.local_block(), whole[first : first + rows])
    with CommDebugMode() as mode:
        x = distribute_tensor(whole + rank, mesh, ragged, src_data_rank=None)
    assert mode.get_total_counts() == 0
    assert torch.equal(x.local_block(), whole[first : first + rows] + rank)
    x.to_local().zero_()
    assert whole.sum() > 0
    assert not x.requires_grad
    assert distribute_tensor(whole.clone().requires_grad_(), mesh, ragged).requires_grad
    assert distribute_tensor(whole.cpu(), mesh, ragged).to_local().device.type == DEVICE
    strided = whole.t().contiguous().t()
    assert torch.equal(distribute_tensor(strided, mesh, ragged).full_tensor(), whole)
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex128):
        y = distribute_tensor(whole.to(dtype), mesh, ragged)
        assert y.dtype == dtype
        assert torch.equal(y.full_tensor(), whole.to(dtype))
    with mesh:
        assert torch.equal(distribute_tensor(whole, placements=ragged).full_tensor(), whole)
        assert distribute_tensor(whole).placements == (Replicate(),)
    plain = distribute_tensor(whole, mesh, [Shard(0)])
    assert type(plain) is DTensor
    assert distribute_tensor(plain, mesh, [Shard(0)]).placements == (Shard(0),)
    for wrong, message in (
        (x, "use redistribute"),
        (plain, "use redistribute"),
        (whole.clone().requires_grad_() * 2, "leaf"),
    ):
        with pytest.raises(ValueError, match=message):
            distribute_tensor(wrong, mesh, ragged)


def check_distribute_on_a_square(rank, world_size):
    mesh, whole = init_device_mesh(DEVICE, (2, 2)), numbers(8, 7)
    ragged = RaggedShard((0,), (1, 3))
    plain = [Replicate(), Shard(0), Shard(1)]
    every = [(ragged, p) for p in plain] + [(p, ragged) for p in plain]
    for placements, source in itertools.product(every, (0, 1, None)):
        here = source is None or mesh.get_coordinate() == (source, source)
        tensor = whole if here else torch.full_like(whole, -1)
        with CommDebugMode() as mode:
            x = distribute_tensor(tensor, mesh, placements, src_data_rank=source)
        assert mode.get_total_counts() == (0 if source is None else 2)
        expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        assert torch.equal(x.to_local(), expected.to_local())
        assert torch.equal(x.full_tensor(), whole)
    with pytest.raises(NotImplementedError, match="next to a RaggedShard"):
        distribute_tensor(whole, mesh, [ragged, Partial()])


def check_factories(rank, world_size):
    mesh, units = init_device_mesh(DEVICE, (world_size,)), UNITS[world_size]
    for placements in ([RaggedShard((0,), units)], [Shard(1)], [Replicate()]):
        options = {"device_mesh": mesh, "placements": placements}
        for name, size, extra in (
            ("zeros", (8, 6), {}),
            ("ones", ((8, 6),), {"dtype": torch.bfloat16}),
            ("full", ((8, 6), 3), {}),
            ("full", ((8, 6), 2.5), {"requires_grad": True}),
            ("rand", (8, 6), {"requires_grad": True}),
            ("randn", ([8, 6],), {"dtype": torch.float64}),
        ):
            torch.manual_seed(5)
            with CommDebugMode() as mode:
                x = getattr(vd, name)(*size, **options, **extra)
            assert mode.get_total_counts() == 0
            torch.manual_seed(5)
            expected = getattr(torch, name)(*size, **extra, device=DEVICE)
            assert type(x) is DTensor
            assert x.placements == tuple(placements)
            assert x.requires_grad == expected.requires_grad
            assert x.dtype == expected.dtype
            assert torch.equal(x.full_tensor(), expected)
        assert vd.empty(8, 6, **options).shape == (8, 6)
        assert vd.empty(torch.Size((8, 6)), **options).dtype == torch.float32
    with mesh:
        assert vd.zeros(3).placements == (Replicate(),)
        assert vd.zeros((), placements=[RaggedShard((), [0] * (world_size - 1) + [1])]).shape == ()
    with pytest.raises(TypeError, match="unknown options"):
        vd.zeros(3, device_mesh=mesh, device="cpu")
    with pytest.raises(NotImplementedError, match="layout"):
        vd.zeros(3, device_mesh=mesh, layout=torch.sparse_coo)


def check_parameters_warn_of_nothing(rank, world_size):
    """A part has no gradient of its own, so no operator needs to leave it behind with a warning."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    weight = torch.nn.Parameter(numbers(8, 6))
    for placement in (Shard(0), Replicate(), RaggedShard((0,), UNITS[world_size])):
        made = [distribute_tensor(weight, mesh, [placement])]
        if not isinstance(placement, RaggedShard):
            stock = torch_distribute_tensor(weight, mesh, [placement])
            made += [adopt(stock), *vd.redistribute_many([stock], [placement])]
        for x in made:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                (x * x).full_tensor().sum().backward()
            assert x.requires_grad
        assert torch.equal(made[0].grad.full_tensor(), 2 * weight)


def check_factory(rank, world_size):
    check_distribute(rank, world_size)
    check_factories(rank, world_size)
    check_parameters_warn_of_nothing(rank, world_size)
    if world_size == 4:
        check_distribute_on_a_square(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_tensors_are_made_and_distributed(run_ranks, world_size):
    run_ranks(check_factory, world_size)
