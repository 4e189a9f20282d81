# SPDX-License-Identifier: Apache-2.0
"""Muon of experts, heads and fused projections, in rounds, over replicas: still the same bits."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from testing.collectives import CountCollectives
from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, Replicate, init_device_mesh
from vescale.fsdp import fully_shard, granularity_for
from vescale.fsdp.optim import Muon
from vescale.fsdp.optim.newton_schulz import newton_schulz

SHAPES = {"experts": (5, 12, 8), "qkv": (24, 10), "gate_up": (3, 14, 6), "plain": (9, 20)}
SPLITS = {"qkv": [12, 6, 6], "gate_up": [7, 7]}
EXPERTS_ONLY = {"experts": (4, 6, 8), "gate_up": (4, 8, 6)}


def split_of(fqn, shape):
    assert shape == SHAPES[fqn]
    return SPLITS.get(fqn)


def tensors_of(seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(DEVICE) for n, s in shapes.items()}


def matrices_of(name, full):
    """Return the matrices of a parameter, as views."""
    whole = full if full.ndim == 3 else full[None]
    return [part for expert in whole for part in expert.split(SPLITS.get(name, full.size(-2)))]


def cut(full, mesh, seed, axis=0):
    """Return this rank's part of a random element-level cut over one mesh axis."""
    ranks = mesh.size(axis)
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, full.numel() + 1, (ranks - 1,), generator=generator).sort()[0]
    edges = [0, *edges.tolist(), full.numel()]
    return place(full, mesh, [b - a for a, b in itertools.pairwise(edges)], axis)


def place(full, mesh, units, axis=0, dims=None):
    dims = tuple(range(full.ndim)) if dims is None else dims
    placements = [Replicate()] * mesh.ndim
    placements[axis] = RaggedShard(dims, units)
    start, end = placements[axis].split(full.shape, mesh.get_local_rank(axis))
    local = full.reshape(-1)[start:end].clone()
    return DTensor.from_local(local, mesh, placements, shape=full.shape)


def assert_like_separate(params, references):
    for name, param in params.items():
        expected = tensors_of(0)[name] * 0
        for mine, whole in zip(matrices_of(name, expected), references[name], strict=True):
            mine.copy_(whole.detach())
        full = param.full_tensor() if isinstance(param, DTensor) else param
        assert torch.equal(full, expected), name


def train(params, mesh, steps, axis=0, **options):
    """Train ``params`` with Muon and their matrices, as parameters of their own, with torch's."""
    references = {
        name: [nn.Parameter(m.clone()) for m in matrices_of(name, full)]
        for name, full in tensors_of(0).items()
    }
    rule = {"lr": 0.05, "adjust_lr_fn": "match_rms_adamw"}
    ours = Muon(params.items(), matrix_split=split_of, **rule, **options)
    theirs = torch.optim.Muon([m for mine in references.values() for m in mine], **rule)
    for step in range(steps):
        for i, (name, grad) in enumerate(tensors_of(1 + step).items()):
            param = params[name]
            param.grad = cut(grad, mesh, i, axis) if isinstance(param, DTensor) else grad
            for whole, part in zip(references[name], matrices_of(name, grad), strict=True):
                whole.grad = part.contiguous()
        ours.step()
        theirs.step()
    return ours, references


def check_separate(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    params = {
        name: nn.Parameter(cut(full, mesh, i))
        for i, (name, full) in enumerate(tensors_of(0).items())
    }
    ours, references = train(params, mesh, 3)
    assert len(ours.plans[0].matrices if ours.plans else range(15)) == 5 + 3 + 6 + 1
    assert_like_separate(params, references)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_experts_and_splits_equal_separate_parameters(run_ranks, world_size):
    """A3: 3-D and matrix_split are bitwise as many 2-D parameters, one by one."""
    run_ranks(check_separate, world_size)


def test_plain_parameters_too():
    params = {name: nn.Parameter(full) for name, full in tensors_of(0).items()}
    _, references = train(params, None, 2)
    assert_like_separate(params, references)


def check_batched(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    results = []
    for batched in (False, True):
        params = {
            name: nn.Parameter(cut(full, mesh, i))
            for i, (name, full) in enumerate(tensors_of(0).items())
        }
        before = {name: param.full_tensor() for name, param in params.items()}
        train(params, mesh, 1, batched_ns=batched)
        results.append([params[name].full_tensor() - before[name] for name in params])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 2e-2 * one.norm()


def test_batched_iterations_are_equal_up_to_rounding(run_ranks):
    """A3, second half: batched within 2e-2 relative."""
    run_ranks(check_batched, 2)


def check_rounds(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    params = {
        name: nn.Parameter(cut(full, mesh, i))
        for i, (name, full) in enumerate(tensors_of(0).items())
    }
    events = []
    start, solved = dist.all_to_all_single, []

    class Watched:
        def __init__(self, work, number):
            self.work, self.number = work, number

        def wait(self):
            events.append(("wait", self.number))
            self.work.wait()

    def all_to_all(*args, **options):
        assert options["async_op"]
        number = sum(kind == "start" for kind, _ in events)
        events.append(("start", number))
        return Watched(start(*args, **options), number)

    def solver(matrix, *options):
        events.append(("solve", len(solved)))
        solved.append(tuple(matrix.shape))
        return newton_schulz(matrix, *options)

    dist.all_to_all_single = all_to_all
    try:
        ours, references = train(params, mesh, 1, max_inflight_bytes=100, ns_fn=solver)
    finally:
        dist.all_to_all_single = start
    assert_like_separate(params, references)
    exchange = ours._gathers[0].exchange
    assert len(exchange.rounds) > 2

    # Started: gather 0, gather 1, return 0, gather 2, return 1, ...; each waited for once.
    numbers = [n for kind, n in events if kind == "start"]
    assert numbers == list(range(2 * len(exchange.rounds)))
    gathers = [0, 1, *range(3, len(numbers), 2)][: len(exchange.rounds)]
    returns = [n for n in numbers if n not in gathers]
    for place, gather in enumerate(gathers):
        arrived = events.index(("wait", gather))
        back = events.index(("start", returns[place]))
        if place + 1 < len(gathers):  # the next one is on its way while this one is solved
            assert events.index(("start", gathers[place + 1])) < arrived
            assert events.index(("wait", gathers[place + 1])) > back
        if place + 1 < len(returns):  # and results travel while the next ones are solved
            assert events.index(("wait", returns[place])) > events.index(
                ("start", returns[place + 1])
            )
        assert arrived < back
    # Every matrix that travels is solved between its arrival and its return.
    for place, indices in enumerate(exchange.rounds):
        mine = [i for i in indices if exchange.plan.roots[i] == rank]
        between = events[
            events.index(("wait", gathers[place])) : events.index(("start", returns[place]))
        ]
        assert sum(kind == "solve" for kind, _ in between) == len(mine)

    # A9: a step's own buffers stay within twice the limit, or three matrices of this size.
    sizes = [2 * (current.away.numel + current.home.numel) for current in exchange._passes]
    largest = max(matrix.numel for matrix in exchange.plan.matrices)
    three = [sum(sizes[i : i + 3]) for i in range(len(sizes))]
    assert max(three) <= max(2 * 100, 3 * 2 * largest)


def test_rounds_overlap_and_bound_the_memory(run_ranks):
    """A9, and overlap by the order of operations: sends start before the solves they hide under."""
    run_ranks(check_rounds, 2, exact=True)


def check_replicas(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replica", "shard"))
    solved = []

    def solver(matrix, *options):
        solved.append(tuple(matrix.shape))
        return newton_schulz(matrix, *options)

    for options in ({}, {"max_inflight_bytes": 400}):
        params = {
            name: nn.Parameter(cut(full, mesh, i, axis=1))
            for i, (name, full) in enumerate(tensors_of(0).items())
        }
        solved.clear()
        ours, references = train(params, mesh, 2, axis=1, ns_fn=solver, **options)
        assert_like_separate(params, references)
        (plan,) = ours.plans
        assert (plan.replicas, plan.world_size) == (2, 2)
        everyone = [None] * world_size
        dist.all_gather_object(everyone, list(solved))
        shapes = sorted(itertools.chain(*everyone))
        assert shapes == sorted(matrix_shapes() * 2)  # two steps, each matrix once in all
        for param in params.values():  # replicas hold the same
            other = param.to_local().clone()
            dist.broadcast(other, group=mesh.get_group(0), group_src=0)
            assert torch.equal(other, param.to_local())


def matrix_shapes():
    fulls = tensors_of(0)
    return [tuple(m.shape) for name, full in fulls.items() for m in matrices_of(name, full)]


def test_replicas_share_the_work(run_ranks):
    """A5 on a hybrid mesh: every matrix is solved once, whatever the number of replicas."""
    run_ranks(check_replicas, 4, exact=True)


def check_whole(rank, world_size):
    """Whole heads and experts, from granularity_for: nothing is sent, nothing gathered."""
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (world_size,))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(12, 8 * world_size, bias=False)
            self.experts = nn.Parameter(torch.randn(2 * world_size, 6, 8))

        def forward(self, x):
            return self.q(x)

    model = Layer().to(DEVICE)
    choose = granularity_for("muon", heads={"q.weight": 8}, experts="experts")
    fully_shard(model, mesh=mesh, granularity=choose)
    muon = Muon(
        model.named_parameters(),
        matrix_split=lambda fqn, shape: [8] * (shape[0] // 8) if fqn == "q.weight" else None,
    )
    (plan,) = muon.plans
    assert len(plan.matrices) == 3 * world_size
    assert plan.is_local
    before = [param.to_local().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with CountCollectives() as count:
        muon.step()
    assert count.total == 0
    for param, old in zip(model.parameters(), before, strict=True):
        assert not old.numel() or not torch.equal(param.to_local(), old)


@pytest.mark.parametrize("world_size", [2, 4])
def test_whole_heads_and_experts_send_nothing(run_ranks, world_size):
    """A6: zero collectives when every matrix is local."""
    run_ranks(check_whole, world_size, exact=True)
