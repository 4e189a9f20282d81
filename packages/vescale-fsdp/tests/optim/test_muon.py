# SPDX-License-Identifier: Apache-2.0
"""Muon on any layout against torch.optim.Muon on whole tensors: the same bits."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from testing.collectives import CountCollectives
from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, Replicate, Shard, init_device_mesh
from vescale.fsdp.optim import Muon
from vescale.fsdp.optim.newton_schulz import newton_schulz

# Square, tall, wide, one row, one column, and sizes that no vector length divides.
SHAPES = [(8, 8), (33, 7), (7, 33), (1, 9), (9, 1), (64, 32), (24, 40), (5, 5)]


ONE_ROUND = {"allgather_base": 1, "alltoall_base": 2}  # gradients there are; there and back


def random_tensors(seed, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def ragged_cuts(world_size, seed=0, shapes=SHAPES):
    """Return one cut for each shape: anywhere inside rows, with empty shards, one kept whole."""
    generator = torch.Generator().manual_seed(seed)
    cuts = []
    for i, (rows, cols) in enumerate(shapes):
        if i == 3:
            cuts.append(
                RaggedShard((), [int(rank == 3 % world_size) for rank in range(world_size)])
            )
            continue
        numel = rows * cols
        edges = torch.randint(0, numel + 1, (world_size - 1,), generator=generator).sort()[0]
        edges = [0, *edges.tolist(), numel]
        cuts.append(RaggedShard((0, 1), [b - a for a, b in itertools.pairwise(edges)]))
    return cuts


def part_of(full, mesh, placement):
    """Return this rank's part of ``full`` under ``placement``, as a DTensor; no communication."""
    if isinstance(placement, RaggedShard):
        start, end = placement.split(full.shape, mesh.get_local_rank())
        local = full.reshape(-1)[start:end].clone()
    elif isinstance(placement, Shard):
        chunks = full.chunk(mesh.size())
        rank = mesh.get_local_rank()
        local = chunks[rank].clone() if rank < len(chunks) else full[:0]
    else:
        local = full.clone()
    return DTensor.from_local(local, mesh, [placement], shape=full.shape, stride=full.stride())


def shard(fulls, mesh, placements):
    pairs = zip(fulls, placements, strict=True)
    return [torch.nn.Parameter(part_of(full, mesh, placement)) for full, placement in pairs]


def set_grads(params, fulls):
    for param, full in zip(params, fulls, strict=True):
        if full is None:
            param.grad = None
        elif isinstance(param, TorchDTensor):
            param.grad = part_of(full, param.device_mesh, param.placements[0])
        else:
            param.grad = full.clone()


def assert_same_bits(params, references):
    for i, (param, reference) in enumerate(zip(params, references, strict=True)):
        expected = reference.detach()
        if isinstance(param, TorchDTensor):
            expected = part_of(expected, param.device_mesh, param.placements[0]).to_local()
            param = param.to_local()
        assert param.dtype == expected.dtype
        assert torch.equal(param, expected), f"tensor {i}: {(param - expected).abs().max()}"


def momenta(optimizer):
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [optimizer.state[param]["momentum_buffer"] for param in params]


def plain(fulls):
    return [torch.nn.Parameter(full.clone()) for full in fulls]


def run_both(ours, params, theirs, references, *, steps=5, first=0):
    for step in range(first, first + steps):
        grads = random_tensors(
            100 + step, references[0].dtype, [tuple(p.shape) for p in references]
        )
        set_grads(params, grads)
        set_grads(references, grads)
        ours.step()
        theirs.step()


class CopyingMuon(torch.optim.Muon):
    """torch's Muon without its bug: the update it normalises in place may be the momentum."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(param.grad))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                names = ("ns_coefficients", "ns_steps", "eps")
                update = newton_schulz(buffer, *(group[name] for name in names))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                ratio = max(1, param.size(0) / param.size(1)) ** 0.5
                param.add_(update, alpha=-group["lr"] * ratio)


def check_bits(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    rules, both = (None, "match_rms_adamw"), (True, False)
    for seed, (rule, nesterov, wire) in enumerate(
        [(r, n, torch.bfloat16) for r in rules for n in both] + [(None, True, torch.float32)]
    ):
        options = {"lr": 0.02, "adjust_lr_fn": rule, "nesterov": nesterov}
        fulls = random_tensors(seed)
        references = plain(fulls)
        params = shard(fulls, mesh, ragged_cuts(world_size, seed))
        ours, theirs = (
            Muon(params, wire_dtype=wire, **options),
            torch.optim.Muon(references, **options),
        )
        run_both(ours, params, theirs, references)
        assert_same_bits(params, references)
        assert_same_bits(momenta(ours), momenta(theirs))

    for dtype, nesterov in itertools.product((torch.bfloat16, torch.float16), both):
        fulls = random_tensors(7, dtype)
        references = plain(fulls)
        params = shard(fulls, mesh, ragged_cuts(world_size, 7))
        stock = nesterov or dtype is not torch.bfloat16
        reference = torch.optim.Muon if stock else CopyingMuon
        wire = torch.float32 if nesterov else torch.bfloat16
        ours = Muon(params, nesterov=nesterov, wire_dtype=wire)
        theirs = reference(references, nesterov=nesterov)
        run_both(ours, params, theirs, references)
        assert_same_bits(params, references)
        assert_same_bits(momenta(ours), momenta(theirs))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ragged_parameters_get_the_bits_of_whole_ones(run_ranks, world_size):
    run_ranks(check_bits, world_size)


def check_groups(rank, world_size):
    """Groups with their own options, tensor learning rates, other placements, a scheduler."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    fulls = random_tensors(1)
    references = plain(fulls)
    rows = RaggedShard((0,), [0, 2, 1])
    cuts = ragged_cuts(world_size)[2:4]
    placements = [Shard(0), Shard(0), *cuts, Replicate(), Shard(0), rows, None]
    params = [
        torch.nn.Parameter(full.clone() if p is None else part_of(full, mesh, p))
        for full, p in zip(fulls, placements, strict=True)
    ]
    triples = [(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]

    def groups(tensors):
        first = {"params": tensors[:2], "lr": torch.tensor(0.03), "momentum": 0.9}
        second = {"params": tensors[2:4], "lr": torch.tensor([0.01]), "weight_decay": 0.0}
        return [first, second, {"params": tensors[4:6], "ns_steps": 3, "nesterov": False}]

    ours, theirs = Muon(groups(params), lr=0.05), torch.optim.Muon(groups(references), lr=0.05)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)) for o in (ours, theirs)
    ]
    run_both(ours, params[:6], theirs, references[:6], steps=2)
    for schedule in schedules:
        schedule.step()
    for optimizer, tensors in ((ours, params), (theirs, references)):
        optimizer.add_param_group({"params": tensors[6:], "adjust_lr_fn": "match_rms_adamw"})
    assert len(ours.plans) == 1
    run_both(ours, params, theirs, references, steps=2)
    assert_same_bits(params, references)
    assert_same_bits(momenta(ours), momenta(theirs))

    with CountCollectives() as count:
        set_grads(params, random_tensors(5))
        loss = ours.step(lambda: torch.tensor(3.0))
    assert loss == 3.0
    assert count.counts == ONE_ROUND

    # Coefficients of each step, and a callable, are used wherever the matrix is solved.
    calls = []

    def solver(matrix, coefficients, steps, eps):
        calls.append((tuple(matrix.shape), matrix.dtype, matrix.is_contiguous()))
        assert (coefficients, steps, eps) == (triples, 3, 1e-5)
        return newton_schulz(matrix, coefficients, steps, eps).float() * 1.001

    options = {"ns_coefficients": triples, "ns_steps": 3, "eps": 1e-5, "ns_fn": solver}
    sharded, whole = plain(fulls), plain(fulls)
    sharded[:6] = shard(fulls[:6], mesh, placements[:6])
    ours, theirs = Muon(sharded, **options), Muon(whole, **options)
    run_both(ours, sharded, theirs, whole, steps=1)
    assert_same_bits(sharded, whole)
    assert all(call[1:] == (torch.bfloat16, True) for call in calls)


def test_groups_placements_schedules_and_callables(run_ranks):
    run_ranks(check_groups, 3, exact=True)


def check_traffic(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    fulls = random_tensors(0)
    params = shard(fulls, mesh, ragged_cuts(world_size))
    solved = []

    def solver(matrix, *options):
        solved.append(tuple(matrix.shape))
        return newton_schulz(matrix, *options)

    for wire, itemsize in ((torch.bfloat16, 2), (torch.float32, 4)):
        optimizer = Muon(params, wire_dtype=wire, ns_fn=solver)
        (plan,) = optimizer.plans
        set_grads(params, random_tensors(1))
        with CountCollectives() as count:
            optimizer.step()
        assert count.counts == ONE_ROUND
        sent = torch.tensor([count.nbytes], device=DEVICE)
        torch.distributed.all_reduce(sent)
        flags = len(params) * world_size * (world_size - 1)
        assert sent.item() == plan.sent_nbytes(itemsize) + flags
        assert plan.sent_nbytes(itemsize) == 2 * itemsize * plan.moved_numel
        shapes = zip(plan.roots, SHAPES, strict=True)
        mine = [shape for root, shape in shapes if root == rank]
        assert sorted(solved) == sorted(mine)  # once, on one rank
        solved.clear()
        numel = sum(matrix.numel for matrix in plan.matrices)
        assert plan.moved_numel <= numel * (world_size - 1) / world_size

    # No matrix is cut: nothing is sent, and a rank may hold none of them.
    shapes = SHAPES[:3]
    fulls = random_tensors(0, shapes=shapes)
    owners = [RaggedShard((), [int(r == i % 2) for r in range(world_size)]) for i in range(2)]
    owners.append(RaggedShard((0,), [int(r == 1) for r in range(world_size)]))
    params, references = shard(fulls, mesh, owners), plain(fulls)
    ours, theirs = Muon(params), torch.optim.Muon(references)
    with CountCollectives() as count:
        run_both(ours, params, theirs, references, steps=2)
    assert count.total == 0
    assert ours.plans[0].moved_numel == 0
    assert_same_bits(params, references)


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_are_those_of_the_plan_and_none_for_whole_matrices(run_ranks, world_size):
    run_ranks(check_traffic, world_size, exact=True)


def check_missing_gradients(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    fulls = random_tensors(3)
    params, references = shard(fulls, mesh, ragged_cuts(world_size, 3)), plain(fulls)
    ours, theirs = Muon(params, lr=0.1), torch.optim.Muon(references, lr=0.1)
    assert len(ours.state_dict()["state"]) == len(params)
    run_both(ours, params, theirs, references, steps=1)

    for step in range(4):
        grads = random_tensors(50 + step)
        # No rank has a gradient for these: weights, decay and momentum must stand still.
        for index in {0, 5 + step % 2}:
            grads[index] = None
        set_grads(params, grads)
        params[2].requires_grad_(step < 2)  # frozen half way, with a gradient left over or not
        if step == 3:
            params[2].grad, grads[2] = None, None
        # One rank lacks what the others have: its share counts as zeros.
        for index in (1, 4, 7):
            if rank == step % world_size:
                params[index].grad = None
            cut = params[index].placements[0]
            start, end = cut.split(grads[index].shape, step % world_size)
            grads[index].view(-1)[start:end] = 0
            if end - start == grads[index].numel():
                grads[index] = None  # its only holder has none
        set_grads(references, grads)
        with CountCollectives() as count:
            ours.step()
        assert count.counts == ONE_ROUND
        theirs.step()
        assert_same_bits(params, references)
        assert_same_bits(momenta(ours), momenta(theirs))
    assert all(set(state) == {"momentum_buffer"} for state in ours.state_dict()["state"].values())

    # A NaN in one element of one gradient spoils that matrix, and that one only.
    grads = random_tensors(60)
    grads[1][20, 3] = float("nan")
    set_grads(params, grads)
    set_grads(references, grads)
    ours.step()
    theirs.step()
    for index, (param, reference) in enumerate(zip(params, references, strict=True)):
        assert reference.isnan().any() == (index == 1)
        start, end = param.placements[0].split(reference.shape, rank)
        expected = reference.detach().view(-1)[start:end]
        torch.testing.assert_close(param.to_local(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_missing_gradients_and_nans_stay_where_they_are(run_ranks, world_size):
    run_ranks(check_missing_gradients, world_size, exact=True)


def check_errors(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    full = torch.randn(4, 6, device=DEVICE)
    cut, other = RaggedShard((0,), [1, 3]), RaggedShard((0,), [2, 2])
    param = shard([full], mesh, [cut])[0]

    units = [1, 3] if rank == 0 else [3, 1]
    differing = shard([full], mesh, [RaggedShard((0,), units)])
    with pytest.raises(RuntimeError, match=r"plan Muon's exchange alike.*pieces"):
        Muon(differing)

    columns = full.chunk(world_size, dim=1)[rank].contiguous()
    columns = DTensor.from_local(columns, mesh, [Shard(1)], shape=(4, 6), stride=(6, 1))
    with pytest.raises(NotImplementedError, match=r"'w' has placements.*Shard\(dim=1\)"):
        Muon([("w", torch.nn.Parameter(columns))])
    line = shard([full.view(24)], mesh, [RaggedShard((0,), [1, 1])])[0]
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 has shape \(24,\)"):
        Muon([param, line])

    optimizer = Muon([("w", param)])
    param.grad = part_of(full, mesh, other)
    before = param.to_local().clone()
    with pytest.raises(ValueError, match=r"'w' has shape.*its gradient.*Redistribute"):
        optimizer.step()
    assert torch.equal(param.to_local(), before)

    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = part_of(full, mesh, other)
    with pytest.raises(ValueError, match=r"its momentum_buffer.*Redistribute"):
        optimizer.load_state_dict(saved)


def test_mistakes_are_reported_on_every_rank(run_ranks):
    run_ranks(check_errors, 2, exact=True)


def check_state(rank, world_size):
    """state_dict and load_state_dict, in memory: the next steps are those of a run not stopped."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    fulls = random_tensors(2, torch.bfloat16)
    cuts = ragged_cuts(world_size, 2)
    params, twins = shard(fulls, mesh, cuts), shard(fulls, mesh, cuts)
    for param in (*params, *twins):
        param.grad_dtype = torch.float32
    optimizer = Muon(params, lr=0.3)
    for seed in range(2):
        set_grads(params, random_tensors(seed))
        optimizer.step()
    assert all(buffer.dtype == torch.float32 for buffer in momenta(optimizer))

    resumed = Muon(twins, lr=0.1)
    seen = []
    resumed.register_load_state_dict_post_hook(lambda o: seen.append(momenta(o)[0].dtype))
    saved = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(saved)
    assert seen == [torch.float32]
    assert resumed.param_groups[0]["lr"] == 0.3
    assert all(buffer.dtype == torch.float32 for buffer in momenta(resumed))
    assert not resumed._optimizer_load_state_dict_pre_hooks
    with torch.no_grad():
        for twin, param in zip(twins, params, strict=True):
            twin.copy_(param)
    for seed in range(2, 4):
        for tensors, opt in ((params, optimizer), (twins, resumed)):
            set_grads(tensors, random_tensors(seed))
            opt.step()
    for one, other in zip((*params, *momenta(optimizer)), (*twins, *momenta(resumed)), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


def test_a_loaded_state_goes_on_bit_for_bit_in_its_own_dtype(run_ranks):
    run_ranks(check_state, 2)


def test_plain_tensors_are_a_drop_in_without_process_group():
    fulls = random_tensors(4)
    references, params = plain(fulls), plain(fulls)
    options = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.8, "eps": 1e-6, "ns_steps": 4}
    ours, theirs = Muon(params, **options), torch.optim.Muon(references, **options)
    assert ours.defaults == theirs.defaults
    for step in range(3):
        grads = random_tensors(step)
        grads[step] = None
        grads[4] = grads[4].view(1, 9).T  # a gradient may come with other strides
        grads[5] = grads[5].T.contiguous().T
        for param, reference, grad in zip(params, references, grads, strict=True):
            param.grad = reference.grad = grad
        ours.step()
        theirs.step()
    assert_same_bits(params, references)

    # Either loads what the other saved.
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    run_both(ours, params, theirs, references, first=3)
    assert_same_bits(params, references)


def test_pickled_and_copied_optimizers_go_on():
    optimizer = Muon(plain(random_tensors(0)), wire_dtype=torch.float32)
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        params = twin.param_groups[0]["params"]
        set_grads(params, random_tensors(1))
        twin.step()
        assert twin.plans == ()
        assert not torch.equal(params[0], optimizer.param_groups[0]["params"][0])


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3,), {}, r"parameter 0 of group 0 has shape \(3,\)"),
        ((2, 3, 4, 5), {}, "split_params"),
        ((2, 3), {"matrix_split": lambda fqn, shape: [1]}, "goes by names"),
        ((2, 3), {"max_inflight_bytes": 0}, "max_inflight_bytes=0"),
        ((2, 3), {"batched_ns": True, "ns_fn": newton_schulz}, "no use for ns_fn"),
        ((2, 3), {"lr": -1.0}, "lr=-1.0"),
        ((2, 3), {"lr": torch.ones(2)}, "2 elements"),
        ((2, 3), {"momentum": -0.1}, "momentum=-0.1"),
        ((2, 3), {"weight_decay": float("nan")}, "weight_decay=nan"),
        ((2, 3), {"adjust_lr_fn": "rms"}, "adjust_lr_fn='rms'"),
        ((2, 3), {"ns_steps": 100}, "ns_steps=100"),
        ((2, 3), {"ns_coefficients": [(1.0, 1.0, 1.0)] * 4}, "ns_steps=5 such triples"),
        ((2, 3), {"wire_dtype": torch.float16}, "wire_dtype=torch.float16"),
    ],
)
def test_wrong_arguments_are_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        Muon([torch.nn.Parameter(torch.zeros(shape))], **options)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_refused_group_leaves_the_optimizer_as_it_was():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = Muon([("w", weight)])
    for bad, message in [
        ({"params": [("b", torch.nn.Parameter(torch.ones(3)))]}, "'b' has shape"),
        ({"params": [("c", torch.nn.Parameter(torch.ones(2, 2))), ("w", weight)]}, "more than one"),
        ({"params": [("c", torch.nn.Parameter(torch.ones(2, 2)))] * 2}, "twice"),
        ({"params": [], "ns_fn": newton_schulz}, "ns_fn is one choice"),
        ({"params": [], "ns_steps": 200}, "ns_steps=200"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(bad)
        assert len(optimizer.param_groups) == 1
    weight.grad = torch.ones(2, 3).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
