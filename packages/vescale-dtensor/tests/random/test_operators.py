# SPDX-License-Identifier: Apache-2.0
"""Random operators on torch's own DTensor and on ours, against one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from testing.models import LanguageModel
from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, _StridedShard, distribute_tensor, random
from vescale.dtensor import rand as our_rand
from vescale.dtensor import randn as our_randn

R = Replicate()
CALLS = {
    "uniform_": lambda t: t.uniform_(-2, 3),
    "normal_": lambda t: t.normal_(1, 2),
    "exponential_": lambda t: t.exponential_(2.0),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "random_": lambda t: t.random_(3, 90),
    "cauchy_": lambda t: t.cauchy_(),
    "trunc_normal_": lambda t: nn.init.trunc_normal_(t, std=0.02),
    "kaiming_normal_": lambda t: nn.init.kaiming_normal_(t),
    "dropout": lambda t: F.dropout(t, 0.3),
    "native_dropout": lambda t: torch.native_dropout(t, 0.3, True)[0],
    "bernoulli": lambda t: torch.bernoulli(torch.sigmoid(t)),
    "bernoulli p": lambda t: torch.bernoulli(t, 0.4),
    "rand_like": lambda t: torch.rand_like(t),
    "randn_like": lambda t: torch.randn_like(t, dtype=torch.float64),
    "randint_like": lambda t: torch.randint_like(t, 2, 90),
    "a sequence": lambda t: (t.normal_(), t.uniform_())[1] + F.dropout(torch.ones_like(t), 0.5),
}


def layouts(world_size, shape):
    line = init_device_mesh(DEVICE, (world_size,))
    yield from ((line, [Shard(0)]), (line, [Shard(1)]), (line, [R]))
    cuts = [0] * world_size
    cuts[-1], cuts[0] = 2, shape[0] * shape[1] - 2
    yield line, [RaggedShard((0, 1), cuts)]
    if world_size == 4:
        square = init_device_mesh(DEVICE, (2, 2))
        yield square, [Shard(0), Shard(1)]
        yield square, [Shard(0), Shard(0)]
        yield square, [R, Shard(0)]
        yield square, [RaggedShard((0,), (1, 0)), Shard(1)]
        if shape[0] % 4 == 0:
            yield square, [_StridedShard(0, split_factor=2), Shard(0)]


def check_equal(call, make, shape, mesh, placements, distribute, name):
    torch.manual_seed(3)
    expected, state = call(make()), torch.get_rng_state()
    x = distribute(make(), mesh, placements, src_data_rank=None)
    torch.manual_seed(3)
    found = call(x)
    assert type(found) is type(x)
    assert tuple(found.placements) == tuple(placements)
    own = distribute(expected, mesh, placements, src_data_rank=None)
    assert torch.equal(found.to_local(), own.to_local()), (name, shape, placements)
    assert torch.equal(torch.get_rng_state(), state), (name, shape, placements)


def check_operators(rank, world_size):
    random.set_mode("device")
    for shape in ((8, 6), (3, 5)):
        for mesh, placements in layouts(world_size, shape):
            ragged = any(isinstance(p, RaggedShard) for p in placements)
            strided = any(isinstance(p, _StridedShard) for p in placements)
            for name, call in CALLS.items():
                for distribute in (torch_distribute_tensor, distribute_tensor):
                    skip = ragged if distribute is torch_distribute_tensor else strided
                    if skip or (strided and name == "native_dropout"):
                        continue
                    make = lambda shape=shape: torch.ones(shape, device=DEVICE)  # noqa: E731
                    check_equal(call, make, shape, mesh, placements, distribute, name)


def check_details(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    check_stock_defect(mesh)
    random.set_mode("device")
    # Transposed memory: torch fills in its order, and normal numbers one by one.
    for name in ("uniform_", "normal_", "dropout", "rand_like"):
        for shape in ((9, 6), (2, 3)):
            make = lambda shape=shape: torch.ones(shape, device=DEVICE).t()  # noqa: E731
            for placements in ([Shard(0)], [Shard(1)]):
                check_equal(
                    CALLS[name], make, shape, mesh, placements, torch_distribute_tensor, name
                )
    # A scale that bfloat16 rounds.
    make = lambda: torch.linspace(-2, 2, 54, device=DEVICE, dtype=torch.bfloat16).view(9, 6)  # noqa: E731
    for placements in ([Shard(0)], [Shard(1)]):
        check_equal(
            CALLS["native_dropout"], make, (9, 6), mesh, placements, torch_distribute_tensor, "bf16"
        )
    # A generator of the user's, which the default one does not follow.
    mine, twin = (torch.Generator(DEVICE).manual_seed(5) for _ in range(2))
    x = torch_distribute_tensor(torch.ones(7, 5, device=DEVICE), mesh, [Shard(1)])
    before = torch.get_rng_state()
    x.normal_(2.0, generator=mine)
    whole = torch.empty(7, 5, device=DEVICE).normal_(mean=2.0, generator=twin)
    assert torch.equal(x.full_tensor(), whole)
    assert torch.equal(mine.get_state(), twin.get_state())
    assert torch.equal(torch.get_rng_state(), before)
    # Factories.
    for make, ours in ((torch.rand, our_rand), (torch.randn, our_randn)):
        for placements in ([Shard(1)], [R], [RaggedShard((0,), [1] + [0] * (world_size - 1))]):
            torch.manual_seed(6)
            expected = make(7, 5, device=DEVICE)
            torch.manual_seed(6)
            found = ours(7, 5, device_mesh=mesh, placements=placements, requires_grad=True)
            assert found.is_leaf
            assert torch.equal(found.full_tensor(), expected)
    # Nothing is defined for sums that nobody formed, nor for probabilities placed otherwise.
    for cls in (DTensor, TorchDTensor):
        pending = cls.from_local(torch.ones(4, 4, device=DEVICE), mesh, [Partial()])
        for call in (lambda t: t.uniform_(), lambda t: F.dropout(t, 0.5), torch.rand_like):
            with pytest.raises((NotImplementedError, RuntimeError)):
                call(pending)
    y = torch_distribute_tensor(torch.ones(7, 5, device=DEVICE), mesh, [R])
    with pytest.raises(NotImplementedError, match="one placement; redistribute"):
        x.bernoulli_(y)
    with pytest.raises(NotImplementedError, match="with a DTensor as its parameter"):
        random.fill.fill(torch.ops.aten.bernoulli_.Tensor, x, (y,))
    # A rank without the tensor.
    for op, args in (("normal_", (1.0, 2.0)), ("uniform_", ()), ("random_", (0, 9))):
        torch.manual_seed(8)
        getattr(torch.empty(70, 31, device=DEVICE), op)(*args)
        after = torch.rand(3, device=DEVICE)
        torch.manual_seed(8)
        random.advance(op, (70, 31), device=DEVICE, args=args)
        assert torch.equal(torch.rand(3, device=DEVICE), after)
    with pytest.raises(ValueError, match=r"op='shuffle'; known are bernoulli_"):
        random.advance("shuffle", (3,))
    some = DeviceMesh(DEVICE, list(range(max(1, world_size - 1))))  # the last rank is outside
    ours = our_randn(7, 5, device_mesh=some, placements=[Shard(0)])
    torch.manual_seed(8)
    ours.normal_()
    state = torch.get_rng_state()
    torch.manual_seed(8)
    whole = torch.empty(7, 5, device=DEVICE).normal_()
    assert torch.equal(torch.get_rng_state(), state)
    assert some.get_coordinate() is None or torch.equal(ours.full_tensor(), whole)


def check_stock_defect(mesh):
    """Why all this: torch's CPU shards of equal size are equal, and the generator is behind."""
    random.set_mode("off")
    assert random.get_mode() == "off"
    if mesh.size() > 1 and DEVICE == "cpu":
        torch.manual_seed(1)
        x = torch_distribute_tensor(torch.empty(4 * mesh.size(), 3), mesh, [Shard(0)]).uniform_()
        parts = x.full_tensor().view(mesh.size(), 12)
        assert all(torch.equal(part, parts[0]) for part in parts)
    with random.use_mode("device"):
        assert random.get_mode() == "device"
    assert random.get_mode() == "off"
    random.turn_on()  # but "off" was chosen
    assert random.get_mode() == "off"
    with pytest.raises(ValueError, match="the modes are 'device', 'off'"):
        random.set_mode("portable")


def check_seeds(rank, world_size):
    square = init_device_mesh(DEVICE, (world_size // 2, 2)) if world_size == 4 else None
    random.manual_seed(11, square)
    assert random.get_mode() == "device"
    assert torch.initial_seed() == 11
    random.manual_seed(rank, check=False)
    for mesh in (None, square):
        with pytest.raises(ValueError, match=r"seed 5 on rank 0 and 6 on rank 1; pass the same"):
            random.manual_seed(5 + min(rank, 1), mesh)
        assert torch.initial_seed() == rank
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=r"give one from -2\*\*63 to 2\*\*64 - 1, the"):
            random.manual_seed(seed)
    for seed in (2**64 - 1, -(2**63)):
        random.manual_seed(seed)
    for seed in (1.5, True):
        with pytest.raises(TypeError, match="give an int, the same on every rank"):
            random.manual_seed(seed)


def check_model(rank, world_size):
    """Built on meta, sharded anyhow, then reset: the weights of one process."""
    random.manual_seed(9)
    expected, state = LanguageModel(), torch.get_rng_state()
    line = init_device_mesh("cpu", (world_size,))
    meshes = [(line, [Shard(0)]), (line, [Shard(1)]), (line, "ragged")]
    if world_size == 4:
        square = init_device_mesh("cpu", (2, 2))
        meshes += [(square, [Shard(0), Shard(1)]), (square, [Shard(1), Shard(1)])]
    for mesh, placements in meshes:
        with torch.device("meta"):
            model = LanguageModel()
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                place = placements
                if placements == "ragged":
                    rest = [0] * (world_size - 1)
                    dims = tuple(range(param.ndim))
                    ragged = param.numel() and param.ndim
                    place = [RaggedShard(dims, [param.numel(), *rest]) if ragged else R]
                else:
                    place = [Shard(min(p.dim, param.ndim - 1)) if param.ndim else R for p in place]
                x = distribute_tensor(torch.zeros(param.shape), mesh, place, src_data_rank=None)
                setattr(module, name, nn.Parameter(x))
        random.manual_seed(9, check=False)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name, param in model.named_parameters():
            if name != "scale":
                assert torch.equal(param.full_tensor(), expected.get_parameter(name)), name
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_operators_draw_what_one_process_draws(run_ranks, world_size):
    run_ranks(check_all, world_size, exact=True, limit=300)


def check_all(rank, world_size):
    check_details(rank, world_size)
    check_seeds(rank, world_size) if world_size > 1 else None
    random.set_mode("device")
    check_operators(rank, world_size)
    if DEVICE == "cpu":
        check_model(rank, world_size)


def test_a_seed_needs_no_process_group():
    random.manual_seed(4)
    try:
        assert torch.initial_seed() == 4
        assert random.get_mode() == "device"
    finally:
        random.set_mode("off")
