# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor
from vescale.dtensor.debug import CommDebugMode
from vescale.dtensor.spec import layout_of, make_spec

FLOAT8 = torch.float8_e4m3fn
UNITS = {  # of 12 rows
    1: [(1,), (2,), (5,), (12,)],
    2: [(1, 1), (1, 3), (0, 5), (4, 2)],
    3: [(1, 1, 1), (1, 0, 3), (0, 0, 12), (2, 1, 3)],
    4: [(1, 1, 1, 1), (1, 0, 2, 3), (0, 1, 0, 1), (0, 0, 7, 0)],
}


def numbers(*shape, dtype=torch.float32):
    return (torch.arange(torch.Size(shape).numel(), device=DEVICE) + 1).view(shape).to(dtype)


def distribute(whole, mesh, placements):
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def collectives(mode):
    return sorted(str(name).split(".")[-1].strip("_") for name in mode.get_comm_counts())


def check_moves_on_a_line(rank, world_size):
    mesh, whole = init_device_mesh(DEVICE, (world_size,)), numbers(12, 5)
    ragged = [RaggedShard((0,), units) for units in UNITS[world_size]]
    ragged.append(RaggedShard((0, 1), [60 // world_size] * world_size))
    odd = [7, *[0] * (world_size - 2), 53] if world_size > 1 else [60]
    ragged.append(RaggedShard((0, 1), odd))
    ragged.append(RaggedShard((), [0] * (world_size - 1) + [1]))
    every = [Replicate(), Shard(0), Shard(1), *ragged]
    distributed = {placement: distribute(whole, mesh, [placement]) for placement in every}
    for x in distributed.values():
        assert torch.equal(x.full_tensor(), whole)
    for source, target in itertools.product(every, every):
        if source in ragged or target in ragged:
            moved = distributed[source].redistribute(mesh, [target])
            assert type(moved) is DTensor
            assert moved.placements == (target,)
            assert moved.shape == whole.shape
            assert torch.equal(moved.to_local(), distributed[target].to_local())
    for source, target in itertools.product([Shard(0), Shard(1), *ragged[:3]], repeat=2):
        if source != target and {source, target} & set(ragged):
            with CommDebugMode() as mode:
                distributed[source].redistribute(mesh, [target])
            alone = world_size == 1  # then all cuts are the same
            assert alone or collectives(mode) == ["alltoall_base"]
            assert alone or mode.get_total_counts() == 1
    with CommDebugMode() as mode:
        for target in ragged:
            distributed[Replicate()].redistribute(mesh, [target])
            distributed[target].redistribute(mesh, [target])
    assert mode.get_total_counts() == 0
    even, uneven = ragged[0], ragged[1]
    with CommDebugMode() as mode:
        distribute(whole, mesh, [even]).full_tensor()
    assert collectives(mode) == ["allgather_base"]
    with CommDebugMode() as mode:
        distribute(whole, mesh, [uneven]).full_tensor()
    assert not {"alltoall_base", "allreduce"} & set(collectives(mode))


def check_partial_on_a_line(rank, world_size):
    mesh, whole = init_device_mesh(DEVICE, (world_size,)), numbers(12, 5)
    total = world_size * (world_size + 1) / 2
    wants = {
        "sum": whole * total,
        "avg": whole * total / world_size,
        "max": whole * world_size,
        "min": whole,
    }
    for units, (op, want) in itertools.product(UNITS[world_size], wants.items()):
        placements = [RaggedShard((0,), units)]
        x = DTensor.from_local(whole * (rank + 1), mesh, [Partial(op)])
        with CommDebugMode() as mode:
            moved = x.redistribute(mesh, placements)
        assert mode.get_total_counts() == 1
        assert not {"allreduce", "allgather_base"} & set(collectives(mode)), collectives(mode)
        expected = distribute(want, mesh, placements)
        torch.testing.assert_close(moved.to_local(), expected.to_local())


def same_bits(a, b):
    as_bytes = [x.contiguous().view(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*as_bytes)


def check_dtypes_in_several_steps(rank, world_size):
    """Moves that take torch's own steps too, in dtypes that gloo does not carry."""
    mesh = init_device_mesh(DEVICE, (2, 2))
    every = [
        [RaggedShard((0,), (1, 2)), Shard(1)],
        [Shard(0), RaggedShard((0, 1), (1, 2))],
        [RaggedShard((), (0, 1)), Shard(0)],
        [Replicate(), RaggedShard((0,), (3, 1))],
    ]
    for dtype in (FLOAT8, torch.int16, torch.uint16, torch.bool, torch.complex64):
        whole = numbers(12, 6).to(torch.int32).to(dtype)
        for source, target in itertools.product(every, every):
            x = distribute_tensor(whole, mesh, source, src_data_rank=None)
            assert same_bits(x.full_tensor(), whole)
            moved = x.redistribute(mesh, target)
            expected = distribute_tensor(whole, mesh, target, src_data_rank=None)
            assert same_bits(moved.to_local(), expected.to_local())
        scalar = distribute_tensor(whole[0, 1], mesh, [Replicate(), RaggedShard((), (0, 1))])
        assert same_bits(scalar.full_tensor(), whole[0, 1])


def check_odd_shapes_and_dtypes(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    last = [0] * (world_size - 1) + [1]
    scalar = distribute(numbers(), mesh, [RaggedShard((), last)])
    assert scalar.to_local().shape == (int(rank == world_size - 1),)
    assert scalar.full_tensor().item() == 1
    assert scalar.redistribute(mesh, [RaggedShard((), last[::-1])]).full_tensor().item() == 1
    for shape in ((0, 4), (12, 0), (0,)):
        x = distribute(numbers(*shape), mesh, [RaggedShard((0,), [1] * world_size)])
        assert x.to_local().shape == (0,)
        assert x.full_tensor().shape == shape
        assert x.redistribute(mesh, [Shard(0)]).full_tensor().shape == shape
        assert x.redistribute(mesh, [RaggedShard((0,), last)]).to_local().shape == (0,)
        shard = distribute(numbers(*shape), mesh, [Shard(0)])
        assert shard.redistribute(mesh, x.placements).to_local().shape == (0,)
    uneven = [RaggedShard((0,), UNITS[world_size][1])]
    for dtype in (torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.int64, FLOAT8):
        whole = numbers(12, 5).to(dtype)
        x = distribute(whole, mesh, uneven)
        assert x.dtype == x.full_tensor().dtype == dtype
        assert same_bits(x.full_tensor(), whole)
        shard = x.redistribute(mesh, [Shard(1)])
        assert same_bits(shard.to_local(), distribute(whole, mesh, [Shard(1)]).to_local())
        assert same_bits(shard.redistribute(mesh, uneven).full_tensor(), whole)


def check_meta(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    uneven = [RaggedShard((0,), UNITS[world_size][1])]
    with CommDebugMode() as mode:
        x = distribute_tensor(torch.empty(12, 5, device="meta"), mesh, uneven)
        assert x.is_meta
        assert x.to_local().shape == (layout_of(x._spec).numel,)
        assert x.redistribute(mesh, [Replicate()]).to_local().shape == (12, 5)
        back = x.redistribute(mesh, [Shard(0)]).redistribute(mesh, uneven)
        assert back.to_local().shape == x.to_local().shape
    assert mode.get_total_counts() == 0


def check_mistakes(rank, world_size):
    mesh, whole = init_device_mesh(DEVICE, (world_size,)), numbers(12, 5)
    x = distribute(whole, mesh, [RaggedShard((0,), UNITS[world_size][1])])
    ragged = [RaggedShard((0,), UNITS[world_size][0])]
    with CommDebugMode() as mode:
        with pytest.raises(NotImplementedError, match="another mesh"):
            x.redistribute(init_device_mesh(DEVICE, (world_size, 1)), ragged)
        with pytest.raises(RuntimeError, match="becomes Partial only by an operator"):
            x.redistribute(mesh, [Partial()])
        with pytest.raises(NotImplementedError, match=r"_StridedShard.*cannot be combined"):
            x.redistribute(mesh, [_StridedShard(0, split_factor=2)])
        with pytest.raises(ValueError, match="needs placements"):
            x.redistribute(mesh)
        with pytest.raises(ValueError, match=r"not a multiple|\d units"):
            x.redistribute(mesh, [RaggedShard((0,), [5, *[0] * (world_size - 2), 6])])
        with pytest.raises(ValueError, match="out of range"):
            x.redistribute(mesh, [Shard(2)])
        with pytest.raises(NotImplementedError, match="cannot average"):
            DTensor.from_local(numbers(12, 5).long(), mesh, [Partial("avg")]).redistribute(
                mesh, ragged
            )
        with pytest.raises(NotImplementedError, match="cannot reduce"):
            DTensor.from_local(whole.to(torch.complex64), mesh, [Partial("max")]).redistribute(
                mesh, ragged
            )
    assert mode.get_total_counts() == 0


def check_line(rank, world_size):
    check_moves_on_a_line(rank, world_size)
    check_partial_on_a_line(rank, world_size)
    check_odd_shapes_and_dtypes(rank, world_size)
    check_meta(rank, world_size)
    check_mistakes(rank, world_size)


def check_moves_on_a_square(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    for shape, ragged in (
        ((8, 6), RaggedShard((0,), (1, 3))),
        ((7, 6), RaggedShard((0, 1), (1, 2))),
    ):
        whole = numbers(*shape)
        plain = [Replicate(), Shard(0), Shard(1)]
        every = [*itertools.product(plain, plain)]
        every += [(ragged, p) for p in plain] + [(p, ragged) for p in plain]
        distributed = {placements: distribute(whole, mesh, placements) for placements in every}
        for x in distributed.values():
            assert torch.equal(x.full_tensor(), whole)
        for source, target in itertools.product(every, every):
            if ragged in source or ragged in target:
                moved = distributed[source].redistribute(mesh, target)
                expected = distributed[target].to_local()
                assert torch.equal(moved.to_local(), expected), (source, target)


def check_partial_on_a_square(rank, world_size):
    mesh, whole = init_device_mesh(DEVICE, (2, 2)), numbers(8, 6)
    ragged, (dp, tp) = RaggedShard((0,), (1, 3)), mesh.get_coordinate()
    local = whole * (1 + dp + 2 * tp)
    for source, want in (
        ((Partial(), Partial()), whole * 10),
        ((Partial(), Replicate()), whole * 3),
        ((Replicate(), Partial()), whole * 4),
    ):
        mine = (
            local
            if source[0] == source[1]
            else whole * (1 + dp if source[0].is_partial() else 1 + 2 * tp)
        )
        x = DTensor.from_local(mine, mesh, source)
        for target in itertools.product([Replicate(), Shard(0), Shard(1), ragged], repeat=2):
            if target.count(ragged) == 1:
                moved = x.redistribute(mesh, target)
                expected = distribute(want, mesh, target)
                assert torch.equal(moved.to_local(), expected.to_local()), (source, target)
    # A Partial axis may stay while the ragged one changes, and be reduced later.
    x = DTensor.from_local(whole * (1 + 2 * tp), mesh, (Replicate(), Partial()))
    pending = x.redistribute(mesh, (ragged, Partial()))
    other = pending.redistribute(mesh, (RaggedShard((0,), (2, 2)), Partial()))
    for y in (pending, other):
        assert torch.equal(y.full_tensor(), whole * 4)
        with CommDebugMode() as mode:
            reduced = y.redistribute(mesh, (y.placements[0], Replicate()))
        assert collectives(mode) == ["allreduce"]
        assert torch.equal(reduced.full_tensor(), whole * 4)
    mixed = make_spec(mesh, (Partial("sum"), Partial("max")), (8, 6), torch.float32)
    with pytest.raises(NotImplementedError, match="one at a time"):
        DTensor(whole, mixed, requires_grad=False).redistribute(mesh, (ragged, Replicate()))


def check_square(rank, world_size):
    check_moves_on_a_square(rank, world_size)
    check_partial_on_a_square(rank, world_size)
    check_dtypes_in_several_steps(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_move_on_one_axis(run_ranks, world_size):
    run_ranks(check_line, world_size)


def test_every_move_on_two_axes(run_ranks):
    run_ranks(check_square, 4, exact=True)


def test_one_rank_moves_without_peers(run_ranks):
    run_ranks(check_single, 1)


def check_single(rank, world_size):
    mesh, whole = init_device_mesh(DEVICE, (1,)), numbers(12, 5)
    every = [Replicate(), Shard(0), Shard(1), RaggedShard((0,), (1,)), RaggedShard((), (1,))]
    for source, target in itertools.product(every, every):
        moved = distribute(whole, mesh, [source]).redistribute(mesh, [target])
        assert torch.equal(moved.full_tensor(), whole)
