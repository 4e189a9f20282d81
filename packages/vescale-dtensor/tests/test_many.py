# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor, redistribute_many
from vescale.dtensor.debug import CommDebugMode

REPLICATE = [Replicate()]


def numbers(*shape, dtype=torch.float32):
    return (torch.arange(torch.Size(shape).numel(), device=DEVICE) + 1).view(shape).to(dtype)


def units(world_size, turn):
    """Return units of 12 rows that depend on ``turn``; some are zero."""
    base = [1, 0, 3, 2][:world_size] if turn % 2 else [1] * world_size
    return RaggedShard((0,), base[turn % world_size :] + base[: turn % world_size])


def sources(mesh, world_size, count):
    placements = [[units(world_size, turn)] for turn in range(count)]
    return [
        distribute_tensor(numbers(12, 1 + turn % 5) + turn, mesh, p, src_data_rank=None)
        for turn, p in enumerate(placements)
    ]


def check_equals_one_by_one(xs, targets, collectives, **options):
    with CommDebugMode() as mode:
        moved = redistribute_many(xs, targets, **options)
    assert mode.get_total_counts() == collectives, dict(mode.get_comm_counts())
    for x, y, target in zip(xs, moved, targets, strict=True):
        alone = x.redistribute(placements=target)
        assert type(y) is DTensor
        assert y._spec == alone._spec
        assert torch.equal(y.to_local(), alone.to_local()), (x.placements, target)
    return moved


def check_counts(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    xs = sources(mesh, world_size, 64)
    check_equals_one_by_one(xs, [REPLICATE] * 64, 1)
    for y in redistribute_many(xs, REPLICATE):  # one list for all
        assert y.to_local().untyped_storage().nbytes() == y.to_local().nbytes
    xs = xs[:10]
    check_equals_one_by_one(xs, [[units(world_size, i + 1)] for i in range(10)], 1)
    check_equals_one_by_one(xs, [[Shard(i % 2)] for i in range(10)], 1)
    shards = [x.redistribute(placements=[Shard(i % 2)]) for i, x in enumerate(xs)]
    check_equals_one_by_one(shards, [x.placements for x in xs], 1)
    check_equals_one_by_one(shards, [REPLICATE] * 10, 1)
    replicas = [x.redistribute(placements=REPLICATE) for x in xs]
    check_equals_one_by_one(replicas, [x.placements for x in xs], 0)
    even, uneven = [units(world_size, 0)], [units(world_size, 1)]
    for op in ("sum", "max", "avg"):
        pending = [DTensor.from_local(numbers(12, 2) + i, mesh, [Partial(op)]) for i in range(6)]
        check_equals_one_by_one(pending, [even] * 6, 1)
        check_equals_one_by_one(pending, [uneven] * 6, 1)
        check_equals_one_by_one(pending, [REPLICATE] * 6, 1)
        check_equals_one_by_one(pending, [[Shard(i % 2)] for i in range(6)], 1)


def check_buckets(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    even, uneven = [units(world_size, 0)], [units(world_size, 1)]
    nbytes = 12 * 5 * 4
    xs = [distribute_tensor(numbers(12, 5) * i, mesh, even) for i in range(20)]
    check_equals_one_by_one(xs, [REPLICATE] * 20, 3, bucket_bytes=8 * nbytes)
    check_equals_one_by_one(xs, [REPLICATE] * 20, 20, bucket_bytes=7 * nbytes)  # each too large
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    xs = [
        distribute_tensor(numbers(12, 5, dtype=dtype), mesh, even) for dtype in kinds for _ in "ab"
    ]
    check_equals_one_by_one(xs, [REPLICATE] * 10, 5)
    # Several kinds of moves, moves that change nothing, and torch's own DTensors.
    mixed = [
        (xs[0], REPLICATE),
        (xs[1], uneven),
        (xs[0], even),
        (xs[1], [Shard(1)]),
        (torch_distribute_tensor(numbers(12, 5), mesh, [Shard(0)]), REPLICATE),
        (distribute_tensor(numbers(12, 5).t().contiguous().t(), mesh, [Shard(1)]), REPLICATE),
        (
            distribute_tensor(numbers(), mesh, [RaggedShard((), [1] + [0] * (world_size - 1))]),
            REPLICATE,
        ),
        (distribute_tensor(numbers(0, 5), mesh, even), REPLICATE),
    ]
    moved = redistribute_many([x for x, _ in mixed], [target for _, target in mixed])
    for (x, target), y in zip(mixed, moved, strict=True):
        assert y.placements == tuple(target)
        assert type(y) is DTensor
        assert torch.equal(y.full_tensor(), x.full_tensor())
    assert redistribute_many([], REPLICATE) == []
    meta = distribute_tensor(torch.empty(12, 5, device="meta"), mesh, even)
    assert redistribute_many([meta], REPLICATE)[0].to_local().shape == (12, 5)


def check_gradients(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    even, uneven = [units(world_size, 0)], [units(world_size, 1)]

    def through(*wholes):
        xs = [DTensor.from_local(whole, mesh, REPLICATE, run_check=False) for whole in wholes]
        xs = redistribute_many(xs, [even, [Shard(0)]])
        xs = redistribute_many(xs, [[Shard(1)], uneven])
        xs = redistribute_many(xs, [uneven, even])
        return tuple(x.to_local() for x in redistribute_many(xs, REPLICATE))

    wholes = [numbers(12, k, dtype=torch.float64).requires_grad_() for k in (1, 2)]
    assert torch.autograd.gradcheck(through, wholes)
    # The backward is packed too, and leaves alone what nothing used.
    params = [torch.nn.Parameter(x) for x in sources(mesh, world_size, 12)]
    moved = redistribute_many(params, REPLICATE)
    with CommDebugMode() as mode:
        sum(y.to_local().square().sum() for y in moved[:10]).backward()
    assert mode.get_total_counts() == 0
    for x in params[:10]:
        assert x.grad.placements == x.placements
        torch.testing.assert_close(x.grad.full_tensor(), 2 * x.detach().full_tensor())
    assert params[10].grad is params[11].grad is None
    pending = [DTensor.from_local(numbers(12, 2), mesh, [Partial()]).requires_grad_() for _ in "ab"]
    with CommDebugMode() as mode:
        for y in redistribute_many(pending, uneven):
            y.to_local().sum().backward(retain_graph=True)
    assert [x.grad.placements for x in pending] == [(Replicate(),)] * 2
    with CommDebugMode() as mode:
        loss = sum(y.to_local().sum() for y in redistribute_many(params, even))
        loss.backward()
    assert mode.get_total_counts() == 2


def check_mistakes(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    xs = sources(mesh, world_size, 2)
    with CommDebugMode() as mode:
        for error, match, arguments, options in (
            (TypeError, "takes DTensors", ([numbers(12, 5)], REPLICATE), {}),
            (ValueError, "2 tensors and 1 lists", (xs, [REPLICATE]), {}),
            (ValueError, "bucket_bytes=0", (xs, REPLICATE), {"bucket_bytes": 0}),
            (ValueError, "for a mesh of 1 axes", (xs, [Shard(0), Shard(1)]), {}),
            (ValueError, "out of range", (xs, [REPLICATE, [Shard(2)]]), {}),
            (RuntimeError, "only by an operator", (xs, [REPLICATE, [Partial()]]), {}),
            (
                NotImplementedError,
                "to change meshes",
                (xs, REPLICATE),
                {"mesh": init_device_mesh(DEVICE, (1, world_size))},
            ),
        ):
            with pytest.raises(error, match=match):
                redistribute_many(*arguments, **options)
    assert mode.get_total_counts() == 0


def check_line(rank, world_size):
    check_counts(rank, world_size)
    check_buckets(rank, world_size)
    check_mistakes(rank, world_size)


def check_square(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2))
    ragged, other = RaggedShard((0,), (1, 2)), RaggedShard((0,), (2, 1))
    ends = [
        ((ragged, Shard(1)), (Replicate(), Shard(1))),
        ((ragged, Shard(0)), (Replicate(), Shard(0))),
        ((ragged, Shard(0)), (other, Shard(0))),
        ((ragged, Shard(1)), (Shard(0), Shard(1))),
        ((Replicate(), ragged), (Replicate(), other)),
        ((Shard(0), Shard(0)), (Replicate(), Shard(0))),  # not the last cut: alone
        ((ragged, Replicate()), (Replicate(), ragged)),  # several steps: alone
    ]
    xs = [
        distribute_tensor(numbers(12, 4) + i, mesh, ends[i % 7][0], src_data_rank=None)
        for i in range(28)
    ]
    with CommDebugMode() as mode:
        moved = redistribute_many(xs, [ends[i % 7][1] for i in range(28)], mesh=mesh)
    for i, (x, y) in enumerate(zip(xs, moved, strict=True)):
        assert y.placements == ends[i % 7][1]
        alone = x.redistribute(placements=y.placements)
        assert torch.equal(alone.to_local(), y.to_local())
    # Gathers of axis 0, exchanges of axis 0 and of axis 1, then what moves alone.
    assert 3 < mode.get_total_counts() <= 3 + 4 * 2 + 4
    # Sums that wait beside a ragged cut: one all-reduce for all.
    pending = [
        DTensor.from_local(numbers(9), mesh, (RaggedShard((0,), (1, 1)), Partial()), shape=(6, 3))
        for _ in range(9)
    ]
    targets = [(RaggedShard((0,), (1, 1)), Replicate())] * 9
    with CommDebugMode() as mode:
        for y in redistribute_many(pending, targets):
            assert torch.equal(y.to_local(), numbers(9) * 2)
    assert mode.get_total_counts() == 1


def test_like_moves_share_a_collective(run_ranks):
    run_ranks(check_line, 3, exact=True)


def test_gradients_move_back_in_few_collectives(run_ranks):
    run_ranks(check_gradients, 2, exact=True)


def test_moves_of_one_axis_share_a_collective_on_two(run_ranks):
    run_ranks(check_square, 4, exact=True)
