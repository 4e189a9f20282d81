# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism first, FSDP second, held against one process and against FSDP2."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from testing.ranks import DEVICE
from vescale.dtensor import is_ragged_shard
from vescale.fsdp import MixedPrecisionPolicy, fully_shard, inspect
from vescale.fsdp.units import param_groups

WIDTH, HEADS, HIDDEN, VOCAB, LENGTH = 12, 4, 10, 16, 6


class Attention(nn.Module):
    """Heads are counted from what the projections return, as a tensor-parallel rank has fewer."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.ones(3))  # in no plan: plain, on the data axis only

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.scale.sum()


def build():
    torch.manual_seed(0)
    return Transformer().to(DEVICE)


def parallelize(model, tp):
    """Cut as torch's tutorial does: sequence parallel between blocks, heads within."""
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "mlp_norm": SequenceParallel(),
                "mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def mesh_of(world_size, tp=2):
    return init_device_mesh(DEVICE, (world_size // tp, tp), mesh_dim_names=("dp", "tp"))


def wrap(model, mesh, shard=fully_shard, **options):
    for layer in model.layers:
        shard(layer, mesh=mesh, **options)
    shard(model, mesh=mesh, **options)
    return model


def batch(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randint(0, VOCAB, (3, LENGTH), generator=generator).to(DEVICE)


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_against_torch(rank, world_size):
    mesh = mesh_of(world_size)
    dp = mesh["dp"]
    whole = build()
    ours = wrap(parallelize(build(), mesh["tp"]), dp)
    theirs = wrap(parallelize(build(), mesh["tp"]), dp, fsdp2)
    models = (whole, ours, theirs)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4) for m in models]
    for step in range(3):
        mine = batch(step, dp.get_local_rank())
        losses = [loss_of(m, mine) for m in (ours, theirs)]
        for loss in losses:
            loss.backward()
        for index in range(dp.size()):
            loss = loss_of(whole, batch(step, index))
            if index == dp.get_local_rank():
                torch.testing.assert_close(losses[0], loss)
                torch.testing.assert_close(losses[0], losses[1])
            (loss / dp.size()).backward()
        for (name, param), other, stock in zip(
            whole.named_parameters(), ours.parameters(), theirs.parameters(), strict=True
        ):
            assert other.grad.placements == other.placements
            torch.testing.assert_close(full(other.grad), param.grad, msg=name)
            torch.testing.assert_close(full(other.grad), full(stock.grad), msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), other in zip(whole.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(full(other), param, msg=name)
        assert other.shape == param.shape
        assert other.stride() == param.stride()
    check_forms(ours, mesh)


def check_forms(model, mesh):
    up, scale = model.layers[0].mlp.up.weight, model.scale
    assert up.device_mesh == mesh
    assert up.placements[1] == Shard(0)
    assert is_ragged_shard(up.placements[0])
    assert scale.device_mesh == mesh["dp"]
    assert is_ragged_shard(scale.placements[0])
    layer = model.layers[0]
    layer.unshard()
    gathered = layer.mlp.up.weight
    assert type(gathered) is DTensor
    assert gathered.device_mesh == mesh["tp"]
    assert gathered.placements == (Shard(0),)
    assert gathered.shape == up.shape
    full_buffer = param_groups(layer)[0].weights.full
    memory = gathered.to_local().untyped_storage()
    assert memory.data_ptr() == full_buffer.untyped_storage().data_ptr()
    layer.reshard()
    assert layer.mlp.up.weight is up


def test_tensor_and_sequence_parallel(run_ranks):
    run_ranks(check_against_torch, 4, exact=True)


# --- uneven parts, mixed dtypes, frozen parameters -----------------------------------------------


class Uneven(nn.Module):
    """5 rows over 2 tensor-parallel ranks, and 7 columns."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 5), nn.Linear(5, 7), nn.LayerNorm(7)

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


def parallelize_uneven(model, tp):
    # Between the two a DTensor: a local tensor would not tell that 5 is the whole size.
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    return parallelize_module(model, tp, plan)


def uneven(mesh=None, shard=fully_shard, frozen=(), **options):
    torch.manual_seed(1)
    model = Uneven().to(DEVICE)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if mesh is not None:
        parallelize_uneven(model, mesh["tp"])
        shard(model, mesh=mesh["dp"], **options)
    return model


def data(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(3, 4, generator=generator).to(DEVICE)


def train(model, mesh=None, steps=3, clip=None):
    """Train on the batches of one data rank, or of all of them in one process."""
    params = [p for p in model.parameters() if p.requires_grad]
    # Not the sign of a tiny gradient, and all that are clipped to a norm of 0.01 are small.
    optimizer = torch.optim.AdamW(params, lr=0.01, eps=1e-4 if clip is None else 1e-2)
    for step in range(steps):
        indices = range(2) if mesh is None else [mesh.get_local_rank("dp")]
        for index in indices:
            loss = model(data(step, index)).float().square().mean()
            (loss / len(indices)).backward()
        if clip is not None:
            clip(params)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def assert_same(model, whole, **tolerance):
    for (name, param), other in zip(whole.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(other.detach()), param.detach(), msg=name, **tolerance)
        assert other.requires_grad == param.requires_grad


def check_uneven(rank, world_size):
    mesh = mesh_of(world_size)
    whole, model = uneven(), uneven(mesh)
    sizes = [p.to_local().numel() for p in model.up.parameters()]
    assert_same(model, whole)  # full_tensor, before any step
    total = torch.tensor(sum(sizes), device=DEVICE)
    dist.all_reduce(total)
    assert total.item() == 25
    train(whole), train(model, mesh)
    assert_same(model, whole)
    clone = copy.deepcopy(model)
    train(clone, mesh), train(whole)
    assert_same(clone, whole)
    model.load_state_dict(whole.state_dict())  # plain full tensors
    assert_same(model, whole)
    assert "up.weight" in str(inspect.layout(model))


def check_loading(rank, world_size):
    """State dicts of ours and of FSDP2's load without a checkpoint between them."""
    mesh = mesh_of(world_size)
    whole = uneven()
    train(whole)
    for shard in (fully_shard, fsdp2):
        source = uneven(mesh, shard)
        train(source, mesh)
        for assign in (False, True):
            model = uneven(mesh)
            model.load_state_dict(source.state_dict(), assign=assign)
            assert_same(model, whole)
            model(data(0, 0)).sum().backward()
    model = model.to(torch.bfloat16)
    assert model.up.weight.dtype == torch.bfloat16
    model(data(0, 0).bfloat16()).sum().backward()


def check_frozen(rank, world_size):
    mesh, frozen = mesh_of(world_size), ("up.weight", "norm.bias")
    whole, model = uneven(frozen=frozen), uneven(mesh, frozen=frozen)
    before = full(model.up.weight.detach()).clone()
    train(whole), train(model, mesh)
    assert_same(model, whole)
    assert torch.equal(full(model.up.weight.detach()), before)
    model.unshard()
    assert not model.up.weight.requires_grad
    assert model.up.bias.requires_grad
    assert model.up.weight.shape == (5, 4)
    assert model.up.weight.stride() == (4, 1)
    model.reshard()
    model.up.weight.requires_grad_(True)
    whole.up.weight.requires_grad_(True)
    train(whole), train(model, mesh)
    assert_same(model, whole)


def check_clip(rank, world_size):
    """Stock clipping takes parameters of one mesh: here all of them are tensor-parallel."""
    mesh = mesh_of(world_size)

    def clip(params):
        norms.append(full(torch.nn.utils.clip_grad_norm_(params, 0.01)))

    norms = []
    whole, model = uneven(), uneven(mesh)
    model.norm.requires_grad_(False)
    whole.norm.requires_grad_(False)
    train(whole, clip=clip), train(model, mesh, clip=clip)
    torch.testing.assert_close(norms[3:], norms[:3])
    assert_same(model, whole)


def check_half(rank, world_size):
    mesh = mesh_of(world_size)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours, theirs = uneven(mesh, mp_policy=policy), uneven(mesh, fsdp2, mp_policy=policy)
    train(ours, mesh), train(theirs, mesh)
    for mine, stock in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(full(mine.detach()), full(stock.detach()))


def check_accumulation(rank, world_size):
    mesh = mesh_of(world_size)
    whole, model = uneven(), uneven(mesh, reshard_after_forward=False)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model(data(step, mesh.get_local_rank("dp"))).square().mean().backward()
        for index in range(2):
            (whole(data(step, index)).square().mean() / 2).backward()
    for param, other in zip(whole.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(other.grad), param.grad)


def check_meta(rank, world_size):
    mesh = mesh_of(world_size)
    whole = uneven()
    with torch.device("meta"):
        model = Uneven()
    parallelize_uneven(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    assert model.up.weight.is_meta
    model.to_empty(device=DEVICE)
    model.load_state_dict(whole.state_dict())
    train(whole), train(model, mesh)
    assert_same(model, whole)


def check_step_before_backward(rank, world_size):
    """Local parts of DTensors count versions by themselves; a step is noticed all the same."""
    mesh = mesh_of(world_size)
    model = uneven(mesh)
    loss = model(data(0, 0)).square().mean()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def check_details(rank, world_size):
    for check in (
        check_uneven,
        check_loading,
        check_frozen,
        check_clip,
        check_half,
        check_accumulation,
        check_meta,
        check_step_before_backward,
    ):
        check(rank, world_size)


def test_uneven_frozen_clipped_half_accumulated_meta(run_ranks):
    run_ranks(check_details, 4, exact=True)


# --- checkpoints ---------------------------------------------------------------------------------


def check_checkpoints(rank, world_size, path):
    mesh = mesh_of(world_size)
    build = {"ours": lambda: uneven(mesh), "theirs": lambda: uneven(mesh, fsdp2), "one": uneven}
    whole = uneven()
    train(whole)
    for number, (source, target) in enumerate(
        [("ours", "ours"), ("ours", "theirs"), ("theirs", "ours"), ("ours", "one"), ("one", "ours")]
    ):
        saved, loaded = build[source](), build[target]()
        optimizer = train(saved, None if source == "one" else mesh)
        other = train(loaded, None if target == "one" else mesh, steps=1)
        place = f"{path}/{number}"
        model_state, optimizer_state = get_state_dict(saved, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=place)
        model_state, optimizer_state = get_state_dict(loaded, other)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=place)
        set_state_dict(
            loaded, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert_same(loaded, whole)
        for param, like in zip(loaded.parameters(), saved.parameters(), strict=True):
            mine, wanted = other.state[param]["exp_avg"], optimizer.state[like]["exp_avg"]
            torch.testing.assert_close(full(mine), full(wanted))


def test_checkpoints_to_and_from_fsdp2_with_tensor_parallel(run_ranks, tmp_path):
    run_ranks(check_checkpoints, 4, str(tmp_path), exact=True)


# --- three axes ----------------------------------------------------------------------------------


def check_hybrid(rank, world_size):
    """Replicas over one axis, a ragged cut over the next, tensor parallel parts over the last."""
    for shape in ((2, 1, 2), (1, 2, 2)):
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard", "tp"))
        whole, model = uneven(), parallelize_uneven(uneven(), mesh["tp"])
        fully_shard(model, mesh=mesh["replicate", "shard"])
        replicate, ragged, shard = model.up.weight.placements
        assert replicate.is_replicate()
        assert is_ragged_shard(ragged)
        assert shard == Shard(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
        index = rank // 2
        for step in range(3):
            model(data(step, index)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        train(whole)
        assert_same(model, whole)
        model.load_state_dict(uneven().state_dict())
        assert_same(model, uneven())


def test_hybrid_sharding_with_tensor_parallel(run_ranks):
    run_ranks(check_hybrid, 4, exact=True)
