# SPDX-License-Identifier: Apache-2.0
import copy
import io
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor, redistribute_many
from vescale.dtensor.debug import CommDebugMode
from vescale.dtensor.waiting import Pending, WaitingTensor


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), device=DEVICE, dtype=torch.float32).view(shape)


def waiting(tensor, waited):
    return WaitingTensor(lambda: waited.append(1) or tensor, tensor.to("meta"), tensor.device)


def test_a_waiting_tensor_waits_once_on_its_first_use():
    values, waited = numbers(4, 3), []
    x = waiting(values, waited)
    assert (x.shape, x.dtype, x.device) == (values.shape, values.dtype, values.device)
    assert not waited
    assert torch.equal(x.view(-1) + 1, values.view(-1) + 1)
    assert type(x + x) is torch.Tensor
    x.add_(1)
    assert torch.equal(values, numbers(4, 3) + 1)
    assert repr(x) == repr(values)
    assert torch.equal(torch.cat([x, x]), torch.cat([values, values]))
    assert len(waited) == 1
    for use in (
        copy.deepcopy,
        lambda t: t.numpy(force=True),
        lambda t: t.tolist(),
        lambda t: torch.save(t, io.BytesIO()),
        lambda t: t.to(torch.float64),
    ):
        waited.clear()
        use(waiting(values, waited))
        assert len(waited) == 1


def test_pending_ends_once():
    ended = []
    pending = Pending([None], lambda: ended.append(1) or torch.ones(1))
    assert pending.wait() is pending.wait()
    assert ended == [1]


def moves_of(world_size):
    even, zeros = RaggedShard((0,), [1] * world_size), [0] * (world_size - 2)
    uneven, owner = RaggedShard((0,), [1, *zeros, 2]), RaggedShard((), [*zeros, 0, 1])
    lopsided = RaggedShard((0, 1), [1, *zeros, 35])
    pairs = [(Partial(), ragged) for ragged in (even, uneven, owner)]
    pairs += [(ragged, Replicate()) for ragged in (even, uneven, owner, lopsided)]
    pairs += [(even, uneven), (uneven, Shard(0)), (lopsided, Shard(1)), (Shard(1), uneven)]
    pairs += [(Partial("avg"), even), (Partial("avg"), uneven)]
    return pairs


def check_returns_before_its_peer_enters(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))
    store = dist.FileStore(str(path), world_size)
    for number, (source, target) in enumerate(moves_of(world_size)):
        if source.is_partial():
            x = DTensor.from_local(numbers(12, 3) * (rank + 1), mesh, [source])
        else:
            x = distribute_tensor(numbers(12, 3), mesh, [source], src_data_rank=None)
        expected = x.redistribute(mesh, [target]).to_local()
        for name, move in (
            ("one", lambda: [x.redistribute(mesh, [target], async_op=True)]),  # noqa: B023
            ("many", lambda: redistribute_many([x, x], [target], async_op=True)),  # noqa: B023
        ):
            key = f"{name} {number} returned"
            if rank == 1:  # enters when rank 0 has returned: else both would wait for each other
                store.wait([key], timedelta(seconds=30))
            moved = move()
            if rank == 0:
                store.set(key, "")
            for y in moved:
                assert type(y._local_tensor) is WaitingTensor
                assert y.shape == (12, 3)
                torch.testing.assert_close((y * 1).to_local(), expected, rtol=0, atol=0)
                local = y.to_local()
                assert type(local) is torch.Tensor
                assert torch.equal(local, expected)


def check_use(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    even = RaggedShard((0,), [1] * world_size)
    uneven = RaggedShard((0,), [1, *[0] * (world_size - 2), 2])
    whole = numbers(12, 3)
    x = distribute_tensor(whole, mesh, [even], src_data_rank=None)

    def begin(source=x, target=uneven):
        return source.redistribute(mesh, [target], async_op=True)

    assert torch.equal(begin().full_tensor(), whole)
    assert torch.equal(begin(begin(), Shard(1)).full_tensor(), whole)
    assert torch.equal(redistribute_many([begin()], [Replicate()])[0].to_local(), whole)
    assert torch.equal(begin().redistribute(mesh, [Shard(0)]).full_tensor(), whole)
    assert torch.equal(begin(target=Replicate()).as_torch().to_local(), whole)
    assert begin().sum().item() == whole.sum()
    assert torch.equal(begin().add_(1).full_tensor(), whole + 1)
    assert torch.equal(copy.deepcopy(begin()).full_tensor(), whole)
    assert torch.linalg.vector_norm(begin()).item() == pytest.approx(whole.norm().item())
    with torch.no_grad():
        assert type(begin().to_local()) is torch.Tensor
        assert torch.equal(torch.empty_like(begin()).copy_(begin()).full_tensor(), whole)
    file = io.BytesIO()
    torch.save(begin(), file)
    file.seek(0)
    assert torch.equal(torch.load(file).full_tensor(), whole)
    param = torch.nn.Parameter(x.clone())
    begin(param, Replicate()).to_local().square().sum().backward()
    assert torch.equal(param.grad.full_tensor(), 2 * whole)
    half = x.redistribute(mesh, [uneven], forward_dtype=torch.bfloat16, async_op=True)
    assert half.dtype == half.to_local().dtype == torch.bfloat16
    assert begin(target=even).to_local().equal(x.to_local())
    replica = x.redistribute(mesh, [Replicate()])
    assert torch.equal(begin(replica).to_local(), begin().to_local())  # no collective: at once


def check_line(rank, world_size, path):
    check_returns_before_its_peer_enters(rank, world_size, path)
    check_use(rank, world_size)


def test_an_asynchronous_move_returns_before_its_peer_enters(run_ranks, tmp_path):
    run_ranks(check_line, 3, tmp_path / "store", exact=True)


def test_what_takes_several_steps_is_refused_before_any_of_them(fake_group):
    fake_group(4)
    mesh, ragged = init_device_mesh(DEVICE, (2, 2)), RaggedShard((0,), (1, 3))
    x = distribute_tensor(numbers(12, 3), mesh, (ragged, Replicate()), src_data_rank=None)
    target = (Replicate(), ragged)
    with CommDebugMode() as mode:
        for move in (
            lambda: x.redistribute(mesh, target, async_op=True),
            lambda: redistribute_many([x, x], target, async_op=True),
        ):
            with pytest.raises(NotImplementedError, match="several steps"):
                move()
    assert mode.get_total_counts() == 0
