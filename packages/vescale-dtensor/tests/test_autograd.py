# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor, redistribute_many
from vescale.dtensor.debug import CommDebugMode
from vescale.dtensor.tensor import make_ragged, ragged_spec

UNITS = {1: (4,), 2: (1, 3), 3: (1, 0, 3), 4: (2, 0, 1, 1)}


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE)


def part(whole, units, rank):
    rows = 2 * units[rank]
    return whole[2 * sum(units[:rank]) :][:rows].reshape(-1)


def check_moves(rank, world_size):
    mesh, whole, units = init_device_mesh(DEVICE, (world_size,)), numbers(8, 6), UNITS[world_size]
    ragged, other = [RaggedShard((0,), units)], [RaggedShard((0, 1), units[::-1])]

    def leaf(placements=ragged):
        return distribute_tensor(whole, mesh, placements).requires_grad_()

    # The backward of a gather is a slice: no communication.
    x = leaf()
    y = x.redistribute(mesh, [Replicate()])
    with CommDebugMode() as mode:
        y.backward(torch.ones_like(y))
    assert mode.get_total_counts() == 0
    assert type(x.grad) is DTensor
    assert x.grad.placements == x.placements
    assert torch.equal(x.grad.full_tensor(), torch.ones_like(whole))

    # Data parallel matmul: the gradient of the weight is Partial, and is reduce-scattered.
    x, inputs = leaf(), numbers(4 * world_size, 8, seed=1)
    out = distribute_tensor(inputs, mesh, [Shard(0)]) @ x.redistribute(mesh, [Replicate()])
    out.to_local().sum().backward()
    assert x.grad.placements == x.placements
    torch.testing.assert_close(
        x.grad.full_tensor(), inputs.t() @ torch.ones(4 * world_size, 6, device=DEVICE)
    )

    # Ragged to ragged, to Shard, and through torch's own class.
    for placements in (other, [Shard(0)], [Shard(1)], ragged):
        x = leaf()
        (x.redistribute(mesh, placements) * 3).to_local().sum().backward()
        assert x.grad.placements == x.placements
        assert torch.equal(x.grad.full_tensor(), torch.full_like(whole, 3))
    x = leaf([Shard(0)])
    (x.redistribute(mesh, ragged) * 3).to_local().sum().backward()
    assert x.grad.placements == (Shard(0),)
    assert torch.equal(x.grad.full_tensor(), torch.full_like(whole, 3))
    x = leaf()
    x.redistribute(mesh, [Replicate()]).as_torch().to_local().sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.ones_like(whole))
    x = leaf()
    stock = x.redistribute(mesh, [Shard(1)]).as_torch()
    assert type(stock) is TorchDTensor
    stock.redistribute(mesh, [Replicate()]).to_local().sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.ones_like(whole))

    # A replica from torch's own class meets a ragged tensor: its gradient comes back to torch's.
    stock = distribute_tensor(whole, mesh, [Replicate()]).as_torch().requires_grad_()
    ours = DTensor.from_local(stock.to_local(), mesh, [Replicate()])
    (ours * leaf()).to_local().sum().backward()
    torch.testing.assert_close(stock.grad.full_tensor(), whole)
    assert type(stock.grad) is TorchDTensor

    # The gradient of a Partial is replicated.
    local = whole.clone().requires_grad_()
    partial = DTensor.from_local(local, mesh, [Partial()])
    (partial.redistribute(mesh, ragged) ** 2).to_local().sum().backward()
    torch.testing.assert_close(local.grad, 2 * world_size * whole)


def check_local(rank, world_size):
    mesh, whole, units = init_device_mesh(DEVICE, (world_size,)), numbers(8, 6), UNITS[world_size]
    ragged = [RaggedShard((0,), units)]
    x = distribute_tensor(whole, mesh, ragged).requires_grad_()
    (x.to_local() ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * whole)
    x.grad = None
    x.local_block().sum().backward()
    x.grad.add_(1)  # its memory is its own, although the gradient came as a broadcast scalar
    assert torch.equal(x.grad.full_tensor(), torch.full_like(whole, 2))
    (x.detach().requires_grad_().to_local() * 0).sum().backward()

    local = part(whole, units, rank).clone().requires_grad_()
    y = DTensor.from_local(local, mesh, ragged, shape=(8, 6))
    (y.full_tensor() ** 2).sum().backward()
    torch.testing.assert_close(local.grad, 2 * local.detach())
    block = part(whole, units, rank).view(-1, 6).clone().requires_grad_()
    y = DTensor.from_local(
        block, mesh, ragged, shape=(8, 6), grad_placements=[RaggedShard((0, 1), units)]
    )
    (y * y).redistribute(mesh, [Shard(0)]).to_local().sum().backward()
    torch.testing.assert_close(block.grad, 2 * block.detach())
    # Only a part of the graph needs a gradient.
    z = DTensor.from_local(local.detach(), mesh, ragged, shape=(8, 6))
    assert not z.requires_grad
    # A gradient that is still to be summed over ranks.
    x = distribute_tensor(whole, mesh, [Replicate()]).requires_grad_()
    (x.redistribute(mesh, ragged).to_local() * (rank + 1)).sum().backward()
    want = torch.cat([part(whole, units, r) * 0 + r + 1 for r in range(world_size)])
    torch.testing.assert_close(x.grad.full_tensor().reshape(-1), want)
    x = distribute_tensor(whole, mesh, [Replicate()]).requires_grad_()
    x.to_local(grad_placements=[Partial()]).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full_like(whole, world_size))


def check_operators(rank, world_size):
    mesh, whole, units = init_device_mesh(DEVICE, (world_size,)), numbers(8, 6), UNITS[world_size]
    ragged = [RaggedShard((0,), units)]
    row = numbers(6, seed=2)
    for function in (
        lambda w, r: (w * w).sum(),
        lambda w, r: w.sum(),
        lambda w, r: (torch.nn.functional.silu(w) * r).sum(),
        lambda w, r: (w.view(48).exp().view(8, 6) / (1 + r * r)).mean(),
        lambda w, r: (w - w.mean()).square().sum(),
        lambda w, r: ((w * w).sum(1) * 2).sum(),
        lambda w, r: ((w * w).mean(1, keepdim=True) * w).sum(),
        lambda w, r: (w.amax(1) ** 2).sum(),
        lambda w, r: torch.linalg.vector_norm(w) * 3,
        lambda w, r: (torch.linalg.vector_norm(w, dim=1) * 2).sum(),
        lambda w, r: (w.sum(0) * r).sum(),
        lambda w, r: torch.where(w > 0, w, w * r).sum(),
        lambda w, r: (w.to(torch.float64) * 2).sum().float(),
    ):
        w, r = whole.clone().requires_grad_(), row.clone().requires_grad_()
        x = distribute_tensor(whole, mesh, ragged).requires_grad_()
        y = distribute_tensor(row, mesh, [Replicate()]).requires_grad_()
        expected, found = function(w, r), function(x, y)
        torch.testing.assert_close(found.full_tensor(), expected)
        expected.backward()
        found.backward()
        torch.testing.assert_close(x.grad.full_tensor(), w.grad)
        if r.grad is not None:
            torch.testing.assert_close(y.grad.full_tensor(), r.grad)


def check_second_order(rank, world_size):
    mesh, whole, units = init_device_mesh(DEVICE, (world_size,)), numbers(8, 6), UNITS[world_size]
    x = distribute_tensor(whole, mesh, [RaggedShard((0,), units)]).requires_grad_()
    y = x.redistribute(mesh, [Replicate()])
    (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    torch.testing.assert_close(first.full_tensor(), 3 * whole**2)
    (second,) = torch.autograd.grad((first * first).to_local().sum(), x)
    torch.testing.assert_close(second.full_tensor(), 36 * whole**3)


def check_units_that_differ(rank, world_size):
    """A library may cut by other units on other ranks of the other axis; moves back keep them."""
    mesh, whole = init_device_mesh(DEVICE, (2, 2)), numbers(5, 4)
    units = (1, 2) if mesh.get_local_rank(1) == 0 else (1, 1)
    spec = ragged_spec(mesh, [RaggedShard((0,), units), Shard(0)], (5, 4), whole.dtype)
    part = distribute_tensor(whole, mesh, [Replicate(), Shard(0)]).redistribute(
        placements=[RaggedShard((), (1, 0)), Shard(0)]
    )
    gathered = part.redistribute(placements=[Replicate(), Shard(0)]).to_local().reshape(-1)
    (start, end) = spec.placements[0].split((sum(units), 4), mesh.get_local_rank(0))
    for move in (
        lambda x: x.redistribute(placements=[Replicate(), Shard(0)]),
        lambda x: redistribute_many([x, x * 1], [Replicate(), Replicate()])[0],
        lambda x: x.redistribute(placements=[RaggedShard((0, 1), (1, 4)), Shard(1)]),
        lambda x: x.to_local(),
    ):
        x = make_ragged(gathered[start:end].clone(), spec).requires_grad_()
        y = move(x)
        if isinstance(y, DTensor):
            y = y.full_tensor()
            assert torch.equal(y, whole)
        (y * y).sum().backward()
        assert x.grad.placements == spec.placements
        torch.testing.assert_close(x.grad.to_local(), 2 * gathered[start:end])


def check_dtypes(rank, world_size):
    mesh, whole, units = init_device_mesh(DEVICE, (world_size,)), numbers(8, 6), UNITS[world_size]
    x = distribute_tensor(whole, mesh, [RaggedShard((0,), units)]).requires_grad_()
    y = x.redistribute(mesh, [Replicate()], forward_dtype=torch.bfloat16)
    assert y.dtype == y.to_local().dtype == torch.bfloat16
    assert torch.equal(y.to_local(), whole.bfloat16())
    y.to_local().float().sum().backward()
    assert x.grad.dtype == torch.float32
    x.grad = None
    y = x.redistribute(mesh, [Replicate()], backward_dtype=torch.bfloat16)
    assert y.dtype == torch.float32
    y.backward(distribute_tensor(whole / 3, mesh, [Replicate()]))
    assert x.grad.dtype == torch.float32
    assert torch.equal(x.grad.full_tensor(), (whole / 3).bfloat16().float())
    z = distribute_tensor(whole, mesh, [Shard(0)])
    out = z.redistribute(mesh, [Replicate()], forward_dtype=torch.bfloat16, async_op=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.to_local() + 0, whole.bfloat16())


def check_autograd(rank, world_size):
    check_moves(rank, world_size)
    check_local(rank, world_size)
    check_operators(rank, world_size)
    check_second_order(rank, world_size)
    check_dtypes(rank, world_size)
    if world_size == 4:
        check_units_that_differ(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_follow_every_step(run_ranks, world_size):
    run_ranks(check_autograd, world_size)
