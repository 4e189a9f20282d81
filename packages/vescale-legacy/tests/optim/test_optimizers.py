# SPDX-License-Identifier: Apache-2.0
"""Both optimizers take the steps that one device takes, clipped too."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from testing.ranks import DEVICE
from vescale.legacy.ddp import DistributedDataParallel as DDP
from vescale.legacy.dmodule import parallelize_module
from vescale.legacy.dtensor import DTensor, Replicate, Shard
from vescale.legacy.optim import BasicOptimizer, DistributedOptimizer
from vescale.legacy.optim.base_optimizer import GradOptimizerHookBase
from vescale.legacy.optim.clip_grads import clip_grad_norm_fp32
from vescale.legacy.optim.utils import param_is_sharded_or_replicate_on_first_rank

R, S0, S1 = Replicate(), Shard(0), Shard(1)
PLAN = {
    "parameter": {"1.weight": [S0], "1.bias": [S0], "3.weight": [S1]},
    "forward": {"input": [[S1]], "1.input": [[R]], "3.output": [[S1]]},
}
ADAMW = {"lr": 0.05, "betas": (0.9, 0.95), "weight_decay": 0.1}
STEPS = 3


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to(DEVICE)


def batch(place, step):
    return torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(9 * step + place)).to(
        DEVICE
    )


def groups(model):
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


def train_one_device(ranks, clip):
    model, norms = build(), []
    optimizer = torch.optim.AdamW(groups(model), **ADAMW)
    for step in range(STEPS):
        optimizer.zero_grad()
        for place in range(ranks):
            (model(batch(place, step)).square().sum() / ranks).backward()
        if clip:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def full(x):
    return x.full_tensor() + 0 if isinstance(x, DTensor) else x


def check_steps(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("DP", "TP"))
    place, part = mesh.get_coordinate()
    for kind, clip in (("basic", 0.0), ("sharded", 0.0), ("sharded", 1.0), ("overlap", 1.0)):
        expected, norms = train_one_device(2, clip)
        model = parallelize_module(build(), mesh["TP"], PLAN)
        sharded = kind != "basic"
        ddp = DDP(model, mesh["DP"], use_distributed_optimizer=sharded, bucket_size=30)
        inner, found = torch.optim.AdamW(groups(model), **ADAMW), []
        if sharded:
            optimizer = DistributedOptimizer(
                inner, [ddp], clip_grad=clip, overlap_param_gather=kind == "overlap"
            )
        else:  # the abstract base, as an old script passes it
            optimizer = BasicOptimizer(inner, models=ddp, grad_hook=GradOptimizerHookBase)
        for step in range(STEPS):
            optimizer.zero_grad()
            mine = batch(place, step).chunk(2, 1)[part].contiguous()
            ddp(mine).to_local().square().sum().backward()
            ddp.finish_grad_sync()
            found.append(optimizer.step())
        if kind == "overlap":
            optimizer.finish_param_sync(model_index=0)
        if clip:
            torch.testing.assert_close(torch.stack(found), torch.stack(norms).cpu())
        else:
            assert found == [None] * STEPS
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                full(parameter.detach()), expected[name], msg=f"{kind} {name}"
            )
        assert optimizer.get_loss_scale() == 1.0
        assert len(optimizer.param_groups) == 2


def test_adamw_on_two_by_two(run_ranks):
    run_ranks(check_steps, 4, exact=True)


def check_ownership(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("DP", "TP"))
    place, part = mesh.get_coordinate()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)).to(DEVICE)
    plan = {
        "parameter": {"0.weight": [S0], "0.bias": [S0], "2.weight": [S1]},
        "forward": {"input": [[R]], "2.output": [[R]]},
    }
    parallelize_module(model, mesh["TP"], plan)
    ddp = DDP(model, mesh["DP"], use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(torch.optim.SGD, ddp, optimizer_kwargs={"lr": 0.1})
    # Local elements, last first: 2.bias 4, 2.weight 32, 0.bias 8, 0.weight 32; half is 38.
    sizes = [x.numel() for x in optimizer.get_parameters()]
    assert sizes == ([2, 32, 4] if place == 0 else [32, 6])
    ddp(batch(place, 0)).to_local().square().sum().backward()
    ddp.finish_grad_sync()
    optimizer._copy_model_grads_to_main_grads()
    flat = ddp.grad_buffers[torch.float32].data.view(2, -1)[place]
    given = {x.numel(): x.grad for x in optimizer.get_parameters()}
    order = [4, 32, 2] if place == 0 else [6, 32]
    torch.testing.assert_close(torch.cat([given[size] for size in order]), flat)
    assert param_is_sharded_or_replicate_on_first_rank(model[0].weight)
    assert param_is_sharded_or_replicate_on_first_rank(model[2].bias) == (part == 0)


def test_each_rank_owns_an_equal_range(run_ranks):
    run_ranks(check_ownership, 4, exact=True)


def check_bfloat16(rank, world_size):
    master = build().to(torch.bfloat16)
    model = build().to(torch.bfloat16)
    copies = [p.detach().float() for p in master.parameters()]
    inner = torch.optim.Adam(copies, lr=0.01)
    ddp = DDP(model, dist.group.WORLD, use_distributed_optimizer=True, bucket_size=20)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), [ddp])
    for step in range(STEPS):
        master.zero_grad()
        master(batch(0, step).bfloat16()).sum().backward()
        for copy, parameter in zip(copies, master.parameters(), strict=True):
            copy.grad = parameter.grad.float()
        inner.step()
        for copy, parameter in zip(copies, master.parameters(), strict=True):
            parameter.data.copy_(copy)
        optimizer.zero_grad()
        ddp(batch(0, step).bfloat16()).sum().backward()
        optimizer.step()  # finishes the sync itself
    for expected, parameter in zip(master.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, parameter)


def test_low_precision_parameters_have_fp32_copies(run_ranks):
    run_ranks(check_bfloat16, 2)


def check_refusals(rank, world_size):
    group = dist.group.WORLD
    plain, sharded = (DDP(build(), group, use_distributed_optimizer=s) for s in (False, True))
    sgd = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for make, error, text in (
        (lambda: DistributedOptimizer(sgd, [build()]), AssertionError, "expected one or more"),
        (lambda: DistributedOptimizer(sgd, []), AssertionError, "expected one or more"),
        (lambda: DistributedOptimizer(sgd, plain), ValueError, "use_distributed_optimizer=True"),
        (lambda: DistributedOptimizer(torch.optim.SGD, sharded), ValueError, "optimizer_kwargs"),
        (
            lambda: DistributedOptimizer(torch.optim.SGD(build().parameters(), lr=1), sharded),
            ValueError,
            "in no gradient buffer",
        ),
        (lambda: BasicOptimizer(sgd, sharded), ValueError, "needs whole gradients"),
    ):
        with pytest.raises(error, match=text):
            make()
    alone = DDP(build(), dist.new_group([rank], use_local_synchronization=True), True, True, True)
    with pytest.raises(RuntimeError, match="different data parallel groups"):
        DistributedOptimizer(sgd, [sharded, alone])
    # A DModule without DDP: the optimizer reduces its partial gradients.
    mesh = init_device_mesh(DEVICE, (world_size,))
    model = parallelize_module(build(), mesh, PLAN)
    optimizer = BasicOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(batch(0, 0).chunk(world_size, 1)[rank].contiguous()).to_local().sum().backward()
    assert model.list_grad_sync()
    optimizer.step()
    assert not model.list_grad_sync()
    optimizer.load_state_dict(optimizer.state_dict())
    for norm_type in (2, 1, float("inf")):
        x = torch.arange(4.0, device=DEVICE)
        x.grad = x * (rank + 1)
        everyones = torch.cat([x * (r + 1) for r in range(world_size)])
        norm = clip_grad_norm_fp32(x, x.grad.clone(), 1.0, norm_type)
        assert norm == pytest.approx(everyones.norm(norm_type).item())
        torch.testing.assert_close(x.grad, x * (rank + 1) / (norm + 1e-6))


def test_refusals_and_single_parts(run_ranks):
    run_ranks(check_refusals, 2, exact=True)
