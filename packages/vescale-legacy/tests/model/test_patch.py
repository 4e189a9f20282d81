# SPDX-License-Identifier: Apache-2.0
"""Patched layers compute what one device computes; the others say why they cannot."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from testing.collectives import CountCollectives
from testing.ranks import DEVICE
from vescale.legacy.dmodule import parallelize_module
from vescale.legacy.dtensor import Partial, Replicate, Shard, distribute_tensor
from vescale.legacy.model.patch import get_all_model_patch, vp_cross_entropy, vp_embedding

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def check_embedding(rank, world_size):
    for shape, weight, places in (((4,), [S0], [[R]]), ((2, 2), [R, S0], [[R, R]])):
        mesh = init_device_mesh(DEVICE, shape)
        torch.manual_seed(0)
        reference, ids = nn.Embedding(12, 3).to(DEVICE), torch.randint(12, (2, 5), device=DEVICE)
        reference(ids).square().sum().backward()
        model = nn.Embedding(12, 3).to(DEVICE)
        model.load_state_dict(reference.state_dict())
        parallelize_module(
            model, mesh, {"parameter": {"weight": weight}, "forward": {"input": places}}
        )
        out = model(ids)
        assert all(placement.is_replicate() for placement in out.placements)
        torch.testing.assert_close(out.to_local() + 0, reference(ids))
        out.to_local().square().sum().backward()
        assert model.weight.grad.placements == tuple(weight)
        torch.testing.assert_close(model.weight.grad.full_tensor() + 0, reference.weight.grad)
    mesh = init_device_mesh(DEVICE, (4,))
    with pytest.raises(ValueError, match="does not divide"):
        parallelize_module(nn.Embedding(10, 2), mesh, {"parameter": {"weight": [S0]}})
    model = parallelize_module(nn.Embedding(12, 2), mesh, {"parameter": {"weight": [S0]}})
    with pytest.raises(AssertionError, match="must be replicated"):
        model(distribute_tensor(torch.arange(4, device=DEVICE), mesh, [S0]))
    refused = (
        (nn.Embedding(12, 2), {"input": [[S0]]}),
        (nn.Embedding(12, 2, max_norm=1.0), {}),
    )
    for model, forward in refused:
        with pytest.warns(UserWarning, match="not patched"):
            parallelize_module(model, mesh, {"parameter": {"weight": [S0]}, "forward": forward})
        with pytest.raises(NotImplementedError, match="row-wise sharded embedding"):
            model(torch.arange(4, device=DEVICE))
    for placement in (R, S1):  # torch's own way
        model = parallelize_module(
            nn.Embedding(12, 4), mesh, {"parameter": {"weight": [placement]}}
        )
        assert "forward" in vars(model)
        out = model(distribute_tensor(torch.arange(4, device=DEVICE), mesh, [R]))
        assert out.placements == (placement,)


def test_vocabulary_parallel_embedding(run_ranks):
    run_ranks(check_embedding, 4, exact=True)


def check_cross_entropy(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    torch.manual_seed(0)
    x, target = torch.randn(6, 7, device=DEVICE) * 30, torch.randint(7, (6,), device=DEVICE)
    target[1] = -100
    for reduction in ("mean", "sum", "none"):
        logits = x.clone().requires_grad_()
        expected = F.cross_entropy(logits, target, reduction=reduction)
        expected.sum().backward()
        model = parallelize_module(nn.CrossEntropyLoss(reduction=reduction), mesh)
        cut = distribute_tensor(x, mesh, [S1]).requires_grad_()
        with CountCollectives() as comm:
            loss = model(cut, target)
        assert sum(comm.counts.values()) == 3
        assert loss.placements == (R,)
        torch.testing.assert_close(loss.to_local() + 0, expected.detach())
        loss.sum().backward()
        assert cut.grad.placements == (S1,)
        torch.testing.assert_close(cut.grad.full_tensor() + 0, logits.grad)
        whole = model(distribute_tensor(x, mesh, [R]), distribute_tensor(target, mesh, [R]))
        torch.testing.assert_close(whole.to_local() + 0, expected.detach())
    for options in ({"label_smoothing": 0.1}, {"ignore_index": 3}, {"weight": torch.ones(7)}):
        with pytest.warns(UserWarning, match="not patched"):
            parallelize_module(nn.CrossEntropyLoss(**options).to(DEVICE), mesh)


def test_vocabulary_parallel_cross_entropy(run_ranks):
    run_ranks(check_cross_entropy, 2)


def check_linear(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2))
    torch.manual_seed(0)
    reference, x = nn.Linear(8, 4).to(DEVICE), torch.randn(4, 8, device=DEVICE)
    expected = reference(x)
    plan = {
        "parameter": {"weight": [R, S1]},
        "forward": {"input": [[S0, S1]], "output": [[S0, R]]},
    }
    model = nn.Linear(8, 4).to(DEVICE)
    model.load_state_dict(reference.state_dict())
    parallelize_module(model, mesh, plan)
    part = distribute_tensor(x, mesh, [S0, S1])
    out = model(part)
    assert out.placements == (S0, R)
    torch.testing.assert_close(out.full_tensor() + 0, expected)
    with pytest.raises(ValueError, match="cut by one"):
        parallelize_module(nn.Linear(8, 4), mesh, {"parameter": {"weight": [S1, S1]}})
    with pytest.warns(UserWarning, match="no output in the forward plan"):
        parallelize_module(nn.Linear(8, 4), mesh, {"parameter": {"weight": [R, S1]}})
    dist.barrier()


def test_row_parallel_linear_adds_the_bias_once(run_ranks):
    run_ranks(check_linear, 4, exact=True)


def check_hook_points(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    calls = []
    patch = pytest.MonkeyPatch()
    patch.setattr(vp_embedding.VocabParallelEmbedding, "forward", lambda *args: calls.append(args))
    forward = vp_cross_entropy._VocabParallelCrossEntropy.forward
    patch.setattr(
        vp_cross_entropy._VocabParallelCrossEntropy,
        "forward",
        staticmethod(lambda *args: calls.append(args) or forward(*args)),
    )
    model = parallelize_module(nn.Embedding(4, 2), mesh, {"parameter": {"weight": [S0]}})
    model(torch.arange(4, device=DEVICE))
    loss = parallelize_module(nn.CrossEntropyLoss(), mesh)
    logits = distribute_tensor(torch.randn(2, 4, device=DEVICE), mesh, [S1])
    loss(logits, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    patch.undo()
    assert len(calls) == 2


def test_the_old_hook_points_are_there(run_ranks):
    run_ranks(check_hook_points, 2, exact=True)


def test_all_patches_are_listed():
    assert len(get_all_model_patch()) == 3
