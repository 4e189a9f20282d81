# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor
from vescale.dtensor.debug import CommDebugMode

UNITS = {1: (4,), 2: (1, 3), 3: (1, 0, 3), 4: (2, 0, 1, 1)}


def numbers(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def same_dtype(a, b):
    # Not bit by bit: a vectorised kernel rounds the last elements of its input differently.
    torch.testing.assert_close(a, b)


ELEMENTWISE = [
    lambda a, b: a + b,
    lambda a, b: a - 2,
    lambda a, b: 3 - a,
    lambda a, b: 2**a,
    lambda a, b: a * b - a / (b.abs() + 1),
    lambda a, b: a // 1.5,
    lambda a, b: a % 0.7,
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: torch.where(a > 0, a, 1.0),
    lambda a, b: (a >= b) & (a < 1) | ~(b == 0),
    lambda a, b: (a > 0) == (b > 0),
    lambda a, b: a.isnan() | a.isinf() | (a != b),
    lambda a, b: torch.isclose(a, b),
    lambda a, b: (a.abs() + 1).sqrt().log().nan_to_num(),
    lambda a, b: a.lerp(b, 0.3),
    lambda a, b: torch.addcmul(a, a, b, value=2).clamp(-1, 1),
    lambda a, b: a.clamp(min=b),
    lambda a, b: torch.maximum(a, b).minimum(a * 2),
    lambda a, b: torch.atan2(a, b).pow(2),
    lambda a, b: F.silu(a) + F.gelu(b) + F.relu(a) + F.hardswish(b) + F.leaky_relu(a),
    lambda a, b: a.masked_fill(b > 0, 7.0),
    lambda a, b: a.masked_fill(b > 0, torch.tensor(7.0, device=DEVICE)),
    lambda a, b: a * torch.tensor(2.5, device=DEVICE),
    lambda a, b: torch.complex(a, b).conj() * 2j,
    lambda a, b: torch.frexp(a)[0],
    lambda a, b: a.to(torch.bfloat16).float(),
    lambda a, b: a.double() + b,
    lambda a, b: (a * 10).to(torch.int16) ^ 3,
    lambda a, b: a.bool(),
    lambda a, b: a.to(DEVICE),
    lambda a, b: a.type(torch.float64),
    lambda a, b: a.clone().contiguous().detach(),
    lambda a, b: torch.zeros_like(a),
    lambda a, b: torch.ones_like(a, dtype=torch.int32),
    lambda a, b: torch.full_like(a, 5.0),
    lambda a, b: torch.empty_like(a).fill_(2),
    lambda a, b: a.new_zeros(a.shape),
    lambda a, b: a.new_full(a.shape, 3.0),
    lambda a, b: torch.zeros_like(a).copy_(b),
    lambda a, b: a.clone().mul_(2).add_(b, alpha=3).clamp_(max=1),
    lambda a, b: a.clone().gt_(0),
    lambda a, b: a.clone().masked_fill_(b > 0, 1.0),
    lambda a, b: a.clone().zero_() + a.clone().abs_().erfinv_().nan_to_num_(),
    lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
    lambda a, b: torch.square(a, out=torch.empty_like(a)),
    lambda a, b: a * a[..., :1].mul(0).add(2) if type(a) is torch.Tensor else a * 2,
]


def check_elementwise(rank, world_size):
    mesh, units = init_device_mesh(DEVICE, (world_size,)), UNITS[world_size]
    placements = [RaggedShard((0,), units)]
    s, t = numbers(8, 6), numbers(8, 6, seed=1)
    x, y = (distribute_tensor(whole, mesh, placements) for whole in (s, t))
    for index, function in enumerate(ELEMENTWISE):
        with CommDebugMode() as mode:
            z = function(x, y)
        assert mode.get_total_counts() == 0, index
        assert type(z) is DTensor, index
        assert z.placements == x.placements, index
        expected = function(s, t)
        assert z.dtype == z._spec.tensor_meta.dtype == z.to_local().dtype == expected.dtype, index
        same_dtype(z.full_tensor(), expected)
    out = torch.empty_like(x)
    assert torch.add(x, y, out=out) is out
    assert x.add_(0) is x
    before = x.to_local().data_ptr()
    x.mul_(2).div_(2)
    assert x.to_local().data_ptr() == before
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.float64):
        whole = (s * 3).to(dtype)
        z = distribute_tensor(whole, mesh, placements)
        same_dtype((z + z).full_tensor(), whole + whole)


def check_mixed_operands(rank, world_size):
    mesh, units = init_device_mesh(DEVICE, (world_size,)), UNITS[world_size]
    s, t = numbers(8, 6), numbers(8, 6, seed=1)
    x = distribute_tensor(s, mesh, [RaggedShard((0,), units)])
    for other in (t, t[0], t[:, :1], t[:1], t[0, 0], t[:1, :1]):
        y = distribute_tensor(other.contiguous(), mesh, [Replicate()])
        for z in (x * y, y * x):
            assert z.placements == x.placements
            same_dtype(z.full_tensor(), s * other)
        same_dtype(x.clone().mul_(y).full_tensor(), s * other)
        with implicit_replication():
            same_dtype((x * other).full_tensor(), s * other)
            same_dtype(x.clone().mul_(other).full_tensor(), s * other)
    for other in (t[0, 0], t[:1, :1]):
        same_dtype((x * other).full_tensor(), s * other)
    # One number per row, cut like the rows.
    rows = distribute_tensor(t[:, :1].contiguous(), mesh, x.placements)
    for z in (x * rows, rows * x, torch.where(rows > 0, x, rows)):
        assert z.shape == (8, 6)
    same_dtype((rows - x).full_tensor(), t[:, :1] - s)
    # Other dims in the placement, same ranges.
    renamed = distribute_tensor(t, mesh, [RaggedShard((0, 1), [6 * n for n in units])])
    same_dtype((x + renamed).full_tensor(), s + t)
    # What would need communication says so.
    for other in (
        distribute_tensor(t, mesh, [Shard(0)]),
        distribute_tensor(t, mesh, [Shard(1)]),
        DTensor.from_local(t, mesh, [Partial()]),
        DTensor.from_local(t[0, 0], mesh, [Partial()]),
        distribute_tensor(numbers(3, 8, 6), mesh, [Replicate()]),
    ):
        for function in (lambda a, b: a + b, lambda a, b: b - a, lambda a, b: a.add_(b)):
            with pytest.raises(NotImplementedError, match=r"aten\.(add|sub).*redistribute"):
                function(x, other)
            with pytest.raises(NotImplementedError, match=r"redistribute"):
                torch.add(x, x, out=other)
    y = distribute_tensor(t, mesh, x.placements)
    same_dtype(x.clone().floor_divide_(y).full_tensor(), s.clone().floor_divide_(t))
    z, u = x.clone(), s.clone()
    z[z > 0], u[u > 0] = 3.0, 3.0
    same_dtype(z.full_tensor(), u)
    for wrong in (lambda: z.__setitem__(0, 1.0), lambda: z.__setitem__(z > 0, t[t > 0])):
        with pytest.raises(NotImplementedError, match=r"redistribute"):
            wrong()
    with pytest.raises(NotImplementedError, match="implicit_replication"):
        x + t
    with pytest.raises(NotImplementedError, match="redistribute"):
        distribute_tensor(t, mesh, [Replicate()]).add_(x)


def check_copy(rank, world_size):
    mesh, units = init_device_mesh(DEVICE, (world_size,)), UNITS[world_size]
    s = numbers(8, 6)
    every = [
        [RaggedShard((0,), units)],
        [RaggedShard((0, 1), units[::-1])],
        [RaggedShard((), [0] * (world_size - 1) + [1])],
        [Shard(0)],
        [Shard(1)],
        [Replicate()],
    ]
    for target in every:
        for source in every:
            x = distribute_tensor(torch.zeros(8, 6, device=DEVICE), mesh, target)
            y = distribute_tensor(s, mesh, source)
            before = x._local_tensor.data_ptr()
            assert x.copy_(y) is x
            assert x._local_tensor.data_ptr() == before
            same_dtype(x.to_local(), distribute_tensor(s, mesh, target).to_local())
        stock = torch.distributed.tensor.distribute_tensor(s, mesh, [Shard(0)])
        x = distribute_tensor(torch.zeros(8, 6, device=DEVICE), mesh, target)
        same_dtype(x.copy_(stock).full_tensor(), s)
        same_dtype(torch.zeros_like(stock).copy_(x).full_tensor(), s)
        half = x.to(torch.bfloat16).copy_(x)
        same_dtype(half.full_tensor(), s.bfloat16())
    x = distribute_tensor(torch.zeros(8, 6, device=DEVICE), mesh, every[0])
    row = distribute_tensor(s[0].clone(), mesh, [Replicate()])
    same_dtype(x.copy_(row).full_tensor(), s[0].expand(8, 6))
    with implicit_replication():
        same_dtype(x.copy_(s).full_tensor(), s)


def check_mask(rank, world_size):
    mesh, s = init_device_mesh(DEVICE, (world_size,)), numbers(8, 6)
    for placement in (
        RaggedShard((0,), UNITS[world_size]),
        RaggedShard((), [0] * (world_size - 1) + [1]),
    ):
        x = distribute_tensor(s, mesh, [placement])
        x[x > 0] = 2.0
        x[x.le(-1)] = -3
        same_dtype(x.full_tensor(), s.masked_fill(s > 0, 2.0).masked_fill(s <= -1, -3))
        mask = distribute_tensor(s.bool(), mesh, [Replicate()])
        x[mask] = 1.0
        same_dtype(x.full_tensor(), torch.ones_like(s))


def check_new(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    x = distribute_tensor(numbers(8, 6), mesh, [RaggedShard((0,), UNITS[world_size])])
    z = x.new_ones(3, 2)
    assert type(z) is DTensor
    assert z.placements == (Replicate(),)
    assert torch.equal(z.to_local(), torch.ones(3, 2, device=DEVICE))
    assert x.new_empty(8, 6, dtype=torch.int32).placements == x.placements
    assert torch.empty_like(x, device="meta").is_meta
    assert torch.zeros_like(x, device="cpu").to_local().device.type == "cpu"
    with pytest.raises(NotImplementedError, match="strides"):
        x.new_empty_strided((8, 6), (1, 8))


def check_two_axes(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2))
    s, t = numbers(8, 6), numbers(8, 6, seed=1)
    for placements in (
        [RaggedShard((0,), (1, 3)), Shard(1)],
        [Shard(0), RaggedShard((0,), (3, 1))],
    ):
        x, y = (distribute_tensor(whole, mesh, placements) for whole in (s, t))
        same_dtype((x * 2 + y).full_tensor(), s * 2 + t)
        for other in (t, t[0], t[:, :1], t[0, 0]):
            z = x * distribute_tensor(other.contiguous(), mesh, [Replicate()] * 2)
            assert z.placements == tuple(placements)
            same_dtype(z.full_tensor(), s * other)
        rows = distribute_tensor(t[:, :1].contiguous(), mesh, [placements[0], Replicate()])
        with pytest.raises(NotImplementedError, match="redistribute"):
            x * rows
    _check_pending(mesh, s)


def _check_pending(mesh, s):
    """A Partial axis leaves linear operators only."""
    x = DTensor.from_local(s, mesh, [Replicate(), Partial()])
    x = x.redistribute(mesh, [RaggedShard((0,), (1, 3)), Partial()])
    for function in (
        lambda a: a + a,
        lambda a: a.clone().add_(a),
        lambda a: a * 3,
        lambda a: a.clone().div_(2) - a,
        lambda a: -a,
        lambda a: a.to(torch.float64),
        lambda a: a.view(48).view(8, 6),
        torch.zeros_like,
        lambda a: torch.zeros_like(a).copy_(a),
    ):
        z = function(x)
        assert z.placements == x.placements
        torch.testing.assert_close(z.full_tensor(), function(2 * s))
    whole = distribute_tensor(s, mesh, [RaggedShard((0,), (1, 3)), Replicate()])
    for function in (
        lambda a: a * a,
        lambda a: a + 1,
        lambda a: a.exp(),
        lambda a: 1 / a,
        torch.ones_like,
        lambda a: a + whole,
        lambda a: whole + a,
        lambda a: a.sum(),
        lambda a: torch._foreach_mul([a], 2.0),
        lambda a: torch._foreach_norm([whole, a]),
        lambda a: torch.linalg.vector_norm(a),
    ):
        with pytest.raises(NotImplementedError, match="redistribute"):
            function(x)


def check_pointwise(rank, world_size):
    check_elementwise(rank, world_size)
    check_mixed_operands(rank, world_size)
    check_copy(rank, world_size)
    check_mask(rank, world_size)
    check_new(rank, world_size)
    if world_size == 4:
        check_two_axes(rank, world_size)


@pytest.mark.parametrize("world_size", [3, 4])
def test_elementwise_operators_equal_those_of_one_process(run_ranks, world_size):
    run_ranks(check_pointwise, world_size)
