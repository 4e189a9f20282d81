# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import RaggedShard, distribute_tensor, zeros

FILLS = {
    "normal_": lambda t: t.normal_(1, 2),
    "uniform_": lambda t: t.uniform_(-1, 3),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "random_": lambda t: t.random_(),
    "random_(to)": lambda t: t.random_(9),
    "random_(from, to)": lambda t: t.random_(3, 9),
    "exponential_": lambda t: t.exponential_(0.5),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(),
    "geometric_": lambda t: t.geometric_(0.4),
    "init.normal_": torch.nn.init.normal_,
    "init.trunc_normal_": lambda t: torch.nn.init.trunc_normal_(t, std=0.5, a=-1, b=1),
    "init.kaiming_uniform_": lambda t: torch.nn.init.kaiming_uniform_(t, a=5**0.5),
    "init.kaiming_normal_": torch.nn.init.kaiming_normal_,
    "init.xavier_uniform_": torch.nn.init.xavier_uniform_,
    "init.xavier_normal_": torch.nn.init.xavier_normal_,
    "init.constant_": lambda t: torch.nn.init.constant_(t, 3.0),
    "init.zeros_": torch.nn.init.zeros_,
    "init.ones_": torch.nn.init.ones_,
}


def check_random(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    square = init_device_mesh(DEVICE, (2, 2))
    for dtype in (torch.float32, torch.bfloat16):
        for name, fill in FILLS.items():
            torch.manual_seed(7)
            expected = fill(torch.empty(20, 6, device=DEVICE, dtype=dtype))
            after = torch.rand(1, device=DEVICE)
            for where, placements in (
                (mesh, [RaggedShard((0,), (1, 0, 3, 1))]),
                (mesh, [RaggedShard((0, 1), (7, 50, 3, 60))]),
                (square, [RaggedShard((0,), (1, 4)), Shard(1)]),
                (square, [Replicate(), RaggedShard((0,), (1, 4))]),
            ):
                x = zeros(20, 6, dtype=dtype, device_mesh=where, placements=placements)
                before = x.to_local().data_ptr()
                torch.manual_seed(7)
                assert fill(x) is x
                assert x.to_local().data_ptr() == before
                want = distribute_tensor(expected, where, placements, src_data_rank=None)
                assert torch.equal(x.to_local(), want.to_local()), name
                assert torch.equal(torch.rand(1, device=DEVICE), after), name
    x = zeros(20, 6, device_mesh=mesh, placements=[RaggedShard((0,), (1, 0, 3, 1))])
    mine = torch.Generator(DEVICE).manual_seed(3)
    twin = torch.Generator(DEVICE).manual_seed(3)
    whole = torch.empty(20, 6, device=DEVICE).normal_(generator=twin)
    x.normal_(generator=mine)
    assert torch.equal(x.full_tensor(), whole)
    for make in (
        torch.rand_like,
        torch.randn_like,
        lambda t: torch.rand_like(t, dtype=torch.float64),
        lambda t: torch.randint_like(t, 9),
        lambda t: torch.randint_like(t, 3, 9, dtype=torch.int32),
        lambda t: t.clone().bernoulli_(torch.full((), 0.3, device=DEVICE)),
        lambda t: torch.bernoulli(t, 0.3),
        lambda t: torch.bernoulli(torch.sigmoid(t)),
        lambda t: torch.bernoulli(torch.sigmoid(t.double())),
        lambda t: t.clone().bernoulli_(torch.sigmoid(t)),
    ):
        torch.manual_seed(8)
        expected = make(whole)
        torch.manual_seed(8)
        found = make(x)
        assert found.placements == x.placements
        assert found.dtype == expected.dtype
        assert torch.equal(found.full_tensor(), expected)
    meta = torch.empty_like(x, device="meta")
    assert meta.normal_() is meta
    with pytest.raises(NotImplementedError, match="redistribute"):
        x.bernoulli_(distribute_tensor(whole.sigmoid(), mesh, [Replicate()], src_data_rank=None))
    for dropout in (
        lambda t: torch.nn.functional.dropout(t, 0.3),
        lambda t: torch.native_dropout(t, 0.3, True)[0],
        lambda t: torch.native_dropout(t, 0.3, False)[0],
    ):
        whole.requires_grad_(), x.requires_grad_()
        torch.manual_seed(9)
        expected = dropout(whole)
        torch.manual_seed(9)
        found = dropout(x)
        assert torch.equal(found.full_tensor(), expected)
        (expected_grad,) = torch.autograd.grad(expected.square().sum(), whole)
        (grad,) = torch.autograd.grad(found.square().sum(), x)
        assert torch.equal(grad.full_tensor(), expected_grad)
    module = torch.nn.Linear(6, 20, bias=False, device=DEVICE)
    torch.manual_seed(1)
    module.reset_parameters()
    other = torch.nn.Linear(6, 20, bias=False, device=DEVICE)
    other.weight = torch.nn.Parameter(torch.zeros_like(x))
    torch.manual_seed(1)
    other.reset_parameters()
    assert torch.equal(other.weight.full_tensor(), module.weight)


def test_random_fills_equal_those_of_one_process_bit_by_bit(run_ranks):
    run_ranks(check_random, 4, exact=True)
