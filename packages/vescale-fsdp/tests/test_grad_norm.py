# SPDX-License-Identifier: Apache-2.0
"""Rows 61 and 62 of the project's list of cases are checked here."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from testing.collectives import CountCollectives
from testing.models import batch, build, loss_of, reference_step
from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor
from vescale.fsdp import Elements, Rows, Whole, clip_grad_norm_, fully_shard

ORDERS = (2.0, 1.0, 3.0, 0.5, math.inf, -1.0, -math.inf, 0.0)


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE)


def reference_norm(gradients, order):
    """The fp64 norm of all elements; for 0, torch's number of gradients that are not zero."""
    gradients = [grad.double().cpu() for grad in gradients if grad is not None]
    if order == 0:
        return float(sum(bool(grad.count_nonzero()) for grad in gradients))
    together = torch.cat([grad.flatten() for grad in gradients])
    return torch.linalg.vector_norm(together, order).item() if together.numel() else 0.0


def close(total, expected, rtol=1e-6, what=""):
    assert type(total) is torch.Tensor
    assert total.shape == ()
    assert math.isclose(total.item(), expected, rel_tol=rtol), (total.item(), expected, what)


def with_grad(grad):
    """Return a parameter whose gradient is ``grad``."""
    zeros = torch.zeros_like(grad)
    if isinstance(grad, TorchDTensor) and grad.placements[0].is_partial():
        zeros = zeros.redistribute(placements=[Replicate()])
    param = nn.Parameter(zeros)
    param.grad = grad
    return param


def ragged(whole, mesh, units=None, extra=()):
    ranks = mesh.size(mesh.ndim - 1)
    if units is None:  # equal where it can be
        even = whole.numel() % ranks == 0
        units = [1] * ranks if even else [whole.numel() // ranks] * (ranks - 1)
        units += [] if even else [whole.numel() - sum(units)]
    dims = tuple(range(whole.ndim))
    return with_grad(
        distribute_tensor(whole, mesh, [*extra, RaggedShard(dims, units)], src_data_rank=None)
    )


def full(grad):
    return grad.full_tensor() if isinstance(grad, TorchDTensor) else grad


def wrap(model, shard=fully_shard, **options):
    for layer in model.layers:
        shard(layer, **options)
    return shard(model, **options)


def make_tied():
    return build(tied=True).to(DEVICE)


def make_plain():
    model = build().to(DEVICE)
    model.scale = nn.Parameter(model.scale.detach().view(1))  # FSDP2 takes no 0-dim parameter,
    model.nothing = nn.Parameter(torch.ones(1, 4, device=DEVICE))  # and none without elements
    return model


def by_kind(fqn, param):
    return Whole() if fqn.endswith("bias") else Elements()


def check_models(rank, world_size):
    """Equal to one process, to stock FSDP2 and to torch's own function, clipped or not."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    for how, options in (
        (fully_shard, {"granularity": by_kind}),
        (fully_shard, {"granularity": Rows(3)}),
        (fsdp2_fully_shard, {}),
    ):
        make = make_tied if how is fully_shard else make_plain  # FSDP2 cannot serve this tie
        reference = make()
        reference_step(reference, 0, world_size, DEVICE)
        whole = {name: p.grad for name, p in reference.named_parameters()}
        for order in ORDERS if options else (2.0, math.inf):
            model = wrap(make(), how, mesh=mesh, **options)
            loss_of(model, batch(0, rank, DEVICE)).backward()
            given = model if order in (2.0, math.inf) else model.parameters()
            with CountCollectives() as mode:
                total = clip_grad_norm_(given, 0.1, order)
            assert mode.total == mode.counts["allreduce"] == (world_size > 1)
            expected = reference_norm(whole.values(), order)
            loose = {-1.0: 1e-2, -math.inf: 1e-2}.get(order, 1e-4)  # of elements near zero
            close(total, expected, rtol=loose)
            scale = min(1.0, 0.1 / (total.item() + 1e-6))
            for name, param in model.named_parameters():
                torch.testing.assert_close(
                    param.grad.full_tensor(), whole[name] * scale, rtol=1e-4, atol=1e-6
                )
    stock = wrap(make_plain(), fsdp2_fully_shard, mesh=mesh)
    ours = wrap(make_plain(), mesh=mesh)
    for model in (stock, ours):
        loss_of(model, batch(0, rank, DEVICE)).backward()
    totals = [
        torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.1).full_tensor(),
        clip_grad_norm_(ours, 0.1),
    ]
    torch.testing.assert_close(*totals, rtol=1e-5, atol=0)
    for one, other in zip(stock.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor())


def check_placements(rank, world_size):
    """Every placement, on one mesh: copies and pending sums count once, plain tensors too."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    last = [0] * (world_size - 1) + [1]
    uneven = [11, *[0] * (world_size - 2), 1][:world_size] if world_size > 1 else [1]
    whole = [numbers(4, 3, seed=i) for i in range(9)]

    def make():
        stock = [[Shard(0)], [Shard(1)], [Replicate()]]
        return [
            ragged(whole[0], mesh, last),
            ragged(whole[1], mesh, uneven),
            *(
                with_grad(torch_distribute_tensor(w.clone(), mesh, p, src_data_rank=None))
                for w, p in zip(whole[2:5], stock, strict=True)
            ),
            with_grad(TorchDTensor.from_local(whole[5] / world_size, mesh, [Partial()])),
            with_grad(DTensor.from_local(whole[6].clone(), mesh, [Partial("avg")])),
            with_grad(whole[7].clone()),
            ragged(torch.zeros(0, 3, device=DEVICE), mesh),
            nn.Parameter(torch.ones(3, device=DEVICE)),  # without a gradient
            with_grad(distribute_tensor(whole[8].clone(), mesh, [Replicate()])),
            with_grad(torch.zeros(2, device=DEVICE)),
        ]

    gradients = [*whole, torch.zeros(2)]
    for order in (2.0, 1.0, 0.0, math.inf):
        given = make()
        given.append(given[0])  # once more: counts and is scaled once
        with CountCollectives() as mode:
            total = clip_grad_norm_(given, 2.0, order)
        assert mode.counts["allreduce"] == (world_size > 1), mode.counts
        assert mode.total <= 3  # and one exchange for each kind of pending sum
        expected = reference_norm(gradients, order)
        close(total, expected)
        scale = min(1.0, 2.0 / (expected + 1e-6))
        assert [p.is_partial() for p in given[5].grad.placements] == [True]
        scaled = [param.grad for param in given[:-1] if param.grad is not None and param.numel()]
        for grad, value in zip(scaled, gradients, strict=True):
            torch.testing.assert_close(full(grad), value.to(DEVICE) * scale, rtol=1e-5, atol=1e-7)
    alone = make()[4:5]
    with CountCollectives() as mode:
        close(clip_grad_norm_(alone, math.inf), reference_norm(whole[4:5], 2.0))
    assert mode.total == 0  # replicated: nothing to ask others
    assert torch.equal(alone[0].grad.to_local(), whole[4])


def check_dtypes_and_nothing(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    whole = [numbers(40, 30, seed=i) for i in range(3)]
    half = [ragged(w.bfloat16(), mesh) for w in whole]
    total = clip_grad_norm_(half, math.inf)
    assert total.dtype == torch.float32
    close(total, reference_norm([w.bfloat16() for w in whole], 2.0))  # more exact than bf16
    total = clip_grad_norm_(half, 1.0)
    close(clip_grad_norm_(half, math.inf), 1.0, rtol=1e-2)
    mixed = [ragged(w.to(d), mesh) for w, d in zip(whole, DTYPES, strict=True)]
    total = clip_grad_norm_(mixed, math.inf)
    assert total.dtype == torch.float64
    close(total, reference_norm([w.to(d) for w, d in zip(whole, DTYPES, strict=True)], 2.0))
    # Squares of these do not fit float32 when they are added, but their norm does.
    large = [ragged(torch.full((world_size,), 1.5e19, device=DEVICE), mesh) for _ in range(40)]
    close(clip_grad_norm_(large, math.inf), 1.5e19 * math.sqrt(40 * world_size))
    # Nothing to clip.
    bare = [nn.Parameter(param.detach()) for param in half]
    for order in ORDERS:
        close(clip_grad_norm_(bare, 1.0, order), 0.0)
        close(clip_grad_norm_([], 1.0, order), 0.0)
        close(clip_grad_norm_(nn.Linear(2, 2), 1.0, order), 0.0)
    # A rank without its gradient adds nothing, and nobody waits for it.
    some = [ragged(w, mesh) for w in whole]
    if rank == world_size - 1:
        some[1].grad = None
    assert clip_grad_norm_(some, 1.0).item() > 0
    # While the module holds full parameters, the sharded ones are meant.
    model = fully_shard(nn.Linear(6, 6).to(DEVICE), mesh=mesh)
    model.set_reshard_after_backward(False)
    model(numbers(2, 6)).sum().backward()
    assert not isinstance(model.weight, TorchDTensor)
    assert clip_grad_norm_(model, 1.0).item() > 1.0
    model.reshard()
    close(clip_grad_norm_(model, 1.0), 1.0, rtol=1e-5)


DTYPES = (torch.float64, torch.bfloat16, torch.float32)


def check_nonfinite(rank, world_size):
    """One rank's bad element is every rank's error, before anything is scaled."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    for bad in (math.nan, math.inf):
        for order in (2.0, math.inf, 1.0):
            whole = numbers(4 * world_size)
            whole[0] = bad  # on rank 0 only
            plain = numbers(3)
            params = [ragged(whole, mesh), with_grad(plain.clone()), ragged(numbers(8), mesh)]
            where = r"parameter 0 is" if rank == 0 else "no gradient is"
            with pytest.raises(RuntimeError, match=rf"{bad}; on this rank {where} not finite"):
                clip_grad_norm_(params, 1.0, order, error_if_nonfinite=True)
            assert torch.equal(params[1].grad, plain)
            total = clip_grad_norm_(params, 1.0, order)
            assert math.isnan(total.item()) if math.isnan(bad) else math.isinf(total.item())
    # A plain tensor that is bad on the last rank alone.
    params = [ragged(numbers(8), mesh), with_grad(numbers(3))]
    if rank == world_size - 1:
        params[1].grad[0] = math.nan
    with pytest.raises(RuntimeError, match="not finite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def check_bad_arguments(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    good = ragged(numbers(4), mesh)
    product = with_grad(DTensor.from_local(numbers(4), mesh, [Partial("product")]))
    sparse = nn.Embedding(4, 2, sparse=True, device=DEVICE)
    sparse(torch.tensor([1], device=DEVICE)).sum().backward()
    moved = nn.Parameter(numbers(4))
    moved.grad = numbers(4)
    lost = ragged(numbers(4), mesh)
    with CountCollectives() as mode:
        for error, match, args in (
            (TypeError, "max_norm='high' is a str", ([good], "high")),
            (ValueError, "max_norm=-1.0 is negative", ([good], -1)),
            (ValueError, "max_norm is not a number", ([good], math.nan)),
            (TypeError, "norm_type=None is a NoneType", ([good], 1.0, None)),
            (ValueError, "norm_type is not a number", ([good], 1.0, math.nan)),
            (TypeError, "module_or_params is a int", (3, 1.0)),
            (TypeError, r"module_or_params\[1\] is a str", ([good, "weight"], 1.0)),
            (TypeError, "module_or_params is a str", ("weight", 1.0)),
            (ValueError, "parameter 1: its gradient is P", ([good, product], 1.0)),
            (ValueError, "weight: its gradient is torch.sparse_coo", (sparse, 1.0)),
        ):
            with pytest.raises(error, match=match):
                clip_grad_norm_(*args)
    assert mode.total == 0
    close(clip_grad_norm_(moved, "inf", "inf"), moved.grad.abs().max().item())
    close(clip_grad_norm_(iter([lost]), torch.tensor(1e9)), reference_norm([numbers(4)], 2))


def check_all(rank, world_size):
    check_models(rank, world_size)
    check_placements(rank, world_size)
    check_dtypes_and_nothing(rank, world_size)
    check_nonfinite(rank, world_size)
    check_bad_arguments(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_total_norms_equal_those_of_one_process(run_ranks, world_size):
    run_ranks(check_all, world_size)


def check_meshes(rank, world_size):
    """Dense on 4 ranks, experts on 2x2, on slices of it, and on two ranks only."""
    line = init_device_mesh(DEVICE, (4,))
    square = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("ep", "dp"))
    pair = DeviceMesh(DEVICE, [1, 2])
    dense = numbers(8, 3, seed=1)
    expert = numbers(4, 6, seed=2)
    own = numbers(2, 5, seed=10 + rank // 2)  # the experts of this half
    plain = numbers(3, seed=3)
    halves = [numbers(2, 5, seed=10), numbers(2, 5, seed=11)]
    on = {
        "line": lambda: ragged(dense, line, [1, 1, 2, 4]),
        "sharded twice": lambda: ragged(expert, square, extra=[Shard(0)]),
        "copied": lambda: ragged(expert, square, extra=[Replicate()]),
        "own": lambda: ragged(own, square["dp"]),
        "same": lambda: ragged(expert, square["dp"], [1, 3]),
        "pair": lambda: ragged(expert, pair),
        "plain": lambda: with_grad(plain.clone()),
        "row": lambda: ragged(expert, square["dp"]),
        "column": lambda: ragged(dense, square["ep"]),
    }
    cases = [  # names, what counts, all-reduces, options
        (("line", "sharded twice"), [dense, expert], 1, {}),
        (("line", "copied", "plain"), [dense, expert, plain], 1, {}),
        (("line", "own"), [dense, *halves], 1, {}),
        (("line", "same"), [dense, expert], 1, {"submesh_copies": True}),
        (("line", "pair"), [dense, expert], 1, {}),
        (("copied",), [expert], 1, {}),
        (("sharded twice", "same", "plain"), [expert, expert, plain], 2, {}),
        (("sharded twice", "own"), [expert, *halves], 2, {"submesh_copies": False}),
        (("row", "column"), [expert, dense], 2, {}),
        (("line", "sharded twice", "copied", "own", "pair", "plain"), None, 1, {}),
    ]
    for order in (2.0, 1.0, math.inf):
        for names, counted, collectives, options in cases:
            if counted is None:
                counted = [dense, expert, expert, *halves, expert, plain]
            params = [on[name]() for name in names]
            if rank in (0, 3) and "pair" in names:  # a rank may not know the others' parameters
                params = [p for n, p in zip(names, params, strict=True) if n != "pair"]
            with CountCollectives() as mode:
                total = clip_grad_norm_(params, 1.0, order, **options)
            assert mode.counts == {"allreduce": collectives}, (names, mode.counts)
            close(total, reference_norm(counted, order), what=names)
            everyone = [None] * world_size
            dist.all_gather_object(everyone, total.item())
            assert len(set(everyone)) == 1, "ranks that scale differently train apart"
    with pytest.raises(ValueError, match="norm_type=0"):
        clip_grad_norm_([on["line"](), on["own"]()], 1.0, 0)
    close(clip_grad_norm_([on["line"](), on["copied"]()], 1.0, 0), 2.0)


def test_every_element_counts_once_on_any_mix_of_meshes(run_ranks):
    run_ranks(check_meshes, 4, exact=True)


def test_plain_parameters_need_no_process_group():
    model = nn.Linear(3, 3)
    model(torch.ones(2, 3)).sum().backward()
    other = copy.deepcopy(model)
    for param, source in zip(other.parameters(), model.parameters(), strict=True):
        param.grad = source.grad.clone()
    total = clip_grad_norm_(model, 0.5)
    torch.testing.assert_close(total, nn.utils.clip_grad_norm_(other.parameters(), 0.5))
    for param, source in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param.grad, source.grad)


def test_large_worlds_clip(fake_group):
    fake_group(10240, rank=17)
    model = fully_shard(nn.Linear(64, 64))
    model(torch.ones(1, 64)).sum().backward()
    assert clip_grad_norm_(model, 1.0).shape == ()
