# SPDX-License-Identifier: Apache-2.0
"""Experts on a mesh of their own, in units of their own or side by side with dense parameters."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from testing.ranks import DEVICE
from vescale.dtensor import is_ragged_shard
from vescale.fsdp import clip_grad_norm_, fully_shard, inspect
from vescale.fsdp.optim import Muon
from vescale.fsdp.units import param_groups

WIDTH, HIDDEN, TOKENS = 6, 5, 7


@dataclass
class MeshInfo:
    """What FSDP2 calls FSDPMeshInfo, by its fields."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None


@dataclass
class Result:
    placement: Shard | None
    mesh_info: object


class Experts(nn.Module):
    """Fused experts: every rank of ``ep`` runs its own on the tokens of all of them."""

    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) / HIDDEN**0.5)
        self.ep = None

    def distribute(self, ep):
        self.ep = ep
        for name in ("up", "down"):
            cut = distribute_tensor(getattr(self, name).detach(), ep, [Shard(0)])
            setattr(self, name, nn.Parameter(cut))

    def forward(self, x, gates):
        if self.ep is None:
            return self.run(x, gates, self.up, self.down)
        up, down = self.up.to_local(), self.down.to_local()
        first = self.ep.get_local_rank() * -(-self.up.shape[0] // self.ep.size())
        x, gates = (
            DTensor.from_local(part, self.ep, [Shard(0)])
            .redistribute(placements=[Replicate()])
            .to_local(grad_placements=[Partial()])
            for part in (x, gates)
        )
        out = self.run(x, gates[:, first : first + up.shape[0]], up, down)
        out = DTensor.from_local(out, self.ep, [Partial()])
        return out.redistribute(placements=[Shard(0)]).to_local()

    def run(self, x, gates, up, down):
        hidden = F.gelu(torch.einsum("td,ehd->eth", x, up))
        return torch.einsum("eth,edh,te->td", hidden, down, gates)


class MoE(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.inside, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, count)
        self.experts, self.norm = Experts(count), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = torch.tanh(self.inside(x))
        gates = self.router(x).softmax(-1)
        gates = gates * (gates == gates.amax(-1, keepdim=True))  # one expert a token
        return self.norm(x + self.experts(x, gates))


def moe(count=2):
    torch.manual_seed(3)
    return MoE(count).to(DEVICE)


def data(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(TOKENS, WIDTH, generator=generator).to(DEVICE)


def meshes(world_size, ep):
    dp = init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("dp",))
    own = init_device_mesh(DEVICE, (world_size // ep, ep), mesh_dim_names=("efsdp", "ep"))
    return dp, own["efsdp"], own["ep"]


def in_two_units(count, dp, efsdp, ep, shard=fully_shard):
    model = moe(count)
    model.experts.distribute(ep)
    shard(model.experts, mesh=efsdp)
    if shard is fsdp2:  # gloo does not scale sums, and FSDP2 leaves it to the backend
        model.experts.set_force_sum_reduction_for_comms(True)
    model.experts.set_gradient_divide_factor(dp.size())
    shard(model, mesh=dp)
    return model


def placement_fn(efsdp, info=MeshInfo, result=Result, dim=1):
    own = info(mesh=efsdp, shard_mesh_dim=0)
    return lambda param: result(Shard(dim), own) if param.ndim == 3 else None


def in_one_unit(count, dp, efsdp, ep):
    model = moe(count)
    model.experts.distribute(ep)
    fully_shard(model, mesh=dp, shard_placement_fn=placement_fn(efsdp))
    model.set_gradient_divide_factor(dp.size())
    return model


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference_step(model, step, world_size):
    for index in range(world_size):
        (model(data(step, index)).square().sum(-1).log().mean() / world_size).backward()


def own_step(model, step, rank):
    model(data(step, rank)).square().sum(-1).log().mean().backward()


def assert_same(whole, model, what, where=""):
    for (name, param), other in zip(whole.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            full(what(other)), what(param), msg=lambda text, name=name: f"{where}{name}: {text}"
        )


def check_experts(rank, world_size, ep_size, count):
    """Two experts on two ranks, at one and two data ranks each, and counts that do not divide."""
    dp, efsdp, ep = meshes(world_size, ep_size)
    whole = moe(count)
    models = [build(count, dp, efsdp, ep) for build in (in_two_units, in_one_unit)]
    # On a data mesh of one rank FSDP2's own gradients of the second step are off with a factor.
    if count % ep_size == 0 and efsdp.size() > 1:
        models.append(in_two_units(count, dp, efsdp, ep, fsdp2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4) for m in (whole, *models)]
    for step in range(3):
        reference_step(whole, step, world_size)
        for number, model in enumerate(models):
            own_step(model, step, rank)
            assert_same(whole, model, lambda p: p.grad, f"model {number} step {step} ")
        total = torch.nn.utils.get_total_norm([p.grad.double() for p in whole.parameters()])
        for model in models[:2]:
            norm = clip_grad_norm_(model, 0.05)
            torch.testing.assert_close(norm.double(), total, rtol=1e-5, atol=0)
        for params in (whole.parameters(), models[2].parameters() if len(models) > 2 else ()):
            for param in params:
                param.grad.mul_(min(1.0, 0.05 / (total.item() + 1e-6)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model in models:
        assert_same(whole, model, lambda p: p.detach())
    one_unit = models[1]
    assert [group.mesh for group in param_groups(one_unit)][:2] == [dp, efsdp]
    up = one_unit.experts.up
    assert is_ragged_shard(up.placements[0])
    assert up.device_mesh.mesh_dim_names == ("efsdp", "ep")
    assert "experts.up" in str(inspect.layout(one_unit))
    one_unit.load_state_dict(whole.state_dict())
    assert_same(whole, one_unit, lambda p: p.detach())


def check_pairs(rank, world_size):
    check_experts(rank, world_size, 2, 2)
    if world_size == 4:
        check_experts(rank, world_size, 2, 5)
        check_experts(rank, world_size, 4, 6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_experts_on_a_mesh_of_their_own(run_ranks, world_size):
    run_ranks(check_pairs, world_size, exact=True)


# --- what shard_placement_fn may return ----------------------------------------------------------


def check_answers(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("dp",))
    for wish in (None, Shard(0), Shard(1), Shard(-1)):  # 5 x 6 on any number of ranks
        model = nn.Linear(6, 5).to(DEVICE)
        before = model.weight.detach().clone()
        fully_shard(
            model,
            mesh=mesh,
            shard_placement_fn=lambda param, wish=wish: wish if param.ndim == 2 else None,
        )
        assert is_ragged_shard(model.weight.placements[0])
        dist.broadcast(before, 0)
        gathered = model.weight.full_tensor()
        assert gathered.shape == before.shape
    for answer, error, words in (
        ("rows", TypeError, "weight: shard_placement_fn returned 'rows', expected None"),
        (Shard(2), ValueError, "weight: .*has 2 dims"),
        (Replicate(), TypeError, "expected None"),
        (Result(Shard(0), "mesh"), TypeError, "mesh_info"),
        (Result(Shard(0), MeshInfo(mesh)), ValueError, "shard_mesh_dim=None"),
    ):
        # One rank alone returns it; the others are told.
        fine, model = rank != world_size - 1, nn.Linear(6, 5).to(DEVICE)
        kind, match = (RuntimeError, "cannot wrap the module") if fine else (error, words)
        with pytest.raises(kind, match=match):
            fully_shard(
                model,
                mesh=mesh,
                shard_placement_fn=lambda p, fine=fine, answer=answer: None if fine else answer,
            )
        assert type(model) is nn.Linear
    with pytest.raises(TypeError, match="shard_placement_fn is 'rows'"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn="rows")


def check_torch_result(rank, world_size):
    """The very classes of torch, where it has them."""
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        return
    dp, efsdp, ep = meshes(world_size, 2)
    models = []
    for shard in (fully_shard, fsdp2):
        model = moe(2)
        model.experts.distribute(ep)
        chosen = placement_fn(efsdp, common.FSDPMeshInfo, common.ShardPlacementResult, 0)
        models.append(shard(model, mesh=dp, shard_placement_fn=chosen))
        own_step(model, 0, rank)
    ours, theirs = models
    for param, stock in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), full(stock.grad))


def check_parallel_errors(rank, world_size):
    dp, efsdp, ep = meshes(world_size, 2)
    for placements, mesh, words in (
        ([Shard(0)], dp, "up is a DTensor on .*different axes of one mesh"),
        ([Shard(0)], ep, "overlapping"),
        ([Partial()], efsdp, "redistribute it to Replicate"),
    ):
        experts = Experts(4).to(DEVICE)
        whole = experts.up.detach()
        if placements == [Partial()]:
            cut = DTensor.from_local(whole, ep, placements)
        else:
            cut = distribute_tensor(whole, ep, placements)
        experts.up = nn.Parameter(cut)
        with pytest.raises((ValueError, NotImplementedError), match=words):
            fully_shard(experts, mesh=mesh)


def check_muon_refuses(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(6, 4, bias=False).to(DEVICE)
    cut = distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
    model.weight = nn.Parameter(cut)
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(NotImplementedError, match="parameter 'weight' has placements"):
        Muon(model.named_parameters(), lr=0.01)


def check_placements(rank, world_size):
    check_answers(rank, world_size)
    check_torch_result(rank, world_size)
    check_parallel_errors(rank, world_size)
    check_muon_refuses(rank, world_size)


def test_answers_of_shard_placement_fn(run_ranks):
    run_ranks(check_placements, 4, exact=True)


# --- experts as modules, and payloads ------------------------------------------------------------


class Choosing(nn.Module):
    """Four experts as modules; which one runs is up to the data."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, choice):
        return x + self.experts[choice](x)


def check_choices(rank, world_size):
    torch.manual_seed(0)
    whole = nn.ModuleList(Choosing() for _ in range(2)).to(DEVICE)
    model = nn.ModuleList(Choosing() for _ in range(2)).to(DEVICE)
    model.load_state_dict(whole.state_dict())
    mesh = init_device_mesh(DEVICE, (world_size,))
    for block in model:
        fully_shard(block, mesh=mesh)

    def run(blocks, step, index):
        x = data(step, index)
        for depth, block in enumerate(blocks):
            x = block(x, (index + step * depth) % 3)  # the last one never
        return x.square().mean()

    for step in range(3):
        run(model, step, rank).backward()
        for index in range(world_size):
            (run(whole, step, index) / world_size).backward()
    for param, other in zip(whole.parameters(), model.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None)
        if param.grad is not None:
            torch.testing.assert_close(full(other.grad), param.grad)


def test_ranks_may_choose_other_experts(run_ranks):
    run_ranks(check_choices, 2)


@pytest.mark.parametrize("shape", [(4, 64, 32), (8, 96, 40), (5, 330, 240)])
@pytest.mark.parametrize("world_size", [16, 64])
def test_fused_experts_travel_without_padding(fake_group, world_size, shape):
    fake_group(world_size)
    experts = Experts(1)
    experts.up = nn.Parameter(torch.zeros(shape))
    experts.down = nn.Parameter(torch.zeros(shape).transpose(1, 2).contiguous())
    fully_shard(experts, mesh=init_device_mesh("cpu", (world_size,)))
    assert param_groups(experts)[0].plan.padding <= 0.1
