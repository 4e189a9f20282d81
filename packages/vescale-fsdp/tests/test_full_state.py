# SPDX-License-Identifier: Apache-2.0
"""Rows 76, 85 and 86 of the project's list of cases are checked here."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from testing.memory import PeakBytes
from testing.models import Block, batch, build
from testing.ranks import DEVICE
from vescale.fsdp import Elements, fully_shard, load_full_state_dict
from vescale.fsdp.module import param_groups


class Net(nn.Module):
    """A tie, buffers of both kinds, a state that is no tensor, a 0-dim parameter."""

    def __init__(self, device=None):
        super().__init__()
        self.embed = nn.Embedding(7, 6, device=device)
        self.blocks = nn.ModuleList(Block(6).to(device) for _ in range(2))
        self.norm = nn.BatchNorm1d(6, device=device)
        self.head = nn.Linear(6, 7, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones((), device=device))
        self.register_buffer("table", torch.ones(3, device=device), persistent=False)
        self.step = 0

    def get_extra_state(self):
        return {"step": self.step, "names": ["a"]}

    def set_extra_state(self, state):
        self.step = state["step"]

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return self.head(x) * self.scale * self.table.sum()


def trained():
    """A model in one process whose values are all different from a new one's."""
    torch.manual_seed(5)
    model = Net()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.copy_(torch.rand(tensor.shape) * 9)
    model.step = 17
    return model


def wrapped(model, shard=fully_shard, **options):
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, TorchDTensor) else tensor


def equal(model, source, table=True):
    mine = dict(model.state_dict())
    for name, value in source.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(whole(mine[name]).cpu(), value), name
    assert model.step == source.step
    if table:
        assert torch.equal(model.table.cpu(), source.table)


def with_buffers(source):
    return {**source.state_dict(), "table": source.table}


def check_load(rank, world_size):
    """From rank 0 or from each rank, into real and meta models, ours and stock."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    source = trained()
    state = with_buffers(source)
    for from_rank0 in (True, False):
        given = state if rank == 0 or not from_rank0 else None
        for make in (
            lambda: wrapped(Net().to(DEVICE), mesh=mesh),
            lambda: wrapped(Net("meta"), mesh=mesh, granularity=Elements()),
            lambda: Net().to(DEVICE),
            lambda: Net("meta"),
        ):
            model = make()
            before = dict(model.named_parameters())
            result = load_full_state_dict(model, given, from_rank0=from_rank0)
            assert result == ([], [])
            equal(model, source)
            assert model.head.weight is model.embed.weight
            if param_groups(model):
                assert all(before[name] is param for name, param in model.named_parameters())
    # Gathered parameters are not used once the sharded ones changed.
    model = wrapped(Net().to(DEVICE), mesh=mesh).eval()
    model.set_reshard_after_forward(False)
    tokens = batch(0, 0, DEVICE) % 7
    model(tokens)
    load_full_state_dict(model, state if rank == 0 else None)
    torch.testing.assert_close(model(tokens), source.to(DEVICE).eval()(tokens))
    loss = model.train()(tokens).square().mean()
    loss.backward()
    assert model.embed.weight.grad is not None


def check_like_torch(rank, world_size):
    """Stock FSDP2 loads to the same values by torch's own function and by ours."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    torch.manual_seed(3)
    source = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to(DEVICE)
    state = {name: torch.rand_like(value.float()) for name, value in source.state_dict().items()}
    state["1.num_batches_tracked"] = torch.tensor(11, device=DEVICE)
    models = [copy.deepcopy(source) for _ in range(3)]
    for model, shard in zip(
        models, (fsdp2_fully_shard, fsdp2_fully_shard, fully_shard), strict=True
    ):
        shard(model, mesh=mesh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(models[0], copy.deepcopy(state) if rank == 0 else {}, options=options)
    for model in models[1:]:
        load_full_state_dict(model, state if rank == 0 else None)
    for name, expected in models[0].state_dict().items():
        for model in models[1:]:
            assert torch.equal(whole(model.state_dict()[name]), whole(expected)), name
    # torch's own way in, with a whole tensor on every rank (row 76).
    models[2].load_state_dict({name: value + 1 for name, value in state.items()})
    assert torch.equal(models[2][0].weight.full_tensor(), state["0.weight"] + 1)


def check_names_and_dtypes(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    source = trained()
    state = source.state_dict()

    def load(change, make=lambda: Net().to(DEVICE), **options):
        model = wrapped(make(), mesh=mesh)
        changed = change(dict(state)) if rank == 0 else None
        return model, load_full_state_dict(model, changed, **options)

    def without(*names):
        return lambda s: {key: value for key, value in s.items() if key not in names}

    # A non-persistent buffer may be missing; a tie may have either name, or both.
    for change in (
        lambda s: s,
        without("head.weight"),
        without("embed.weight"),
        lambda s: {f"module.{key}": value for key, value in s.items()},
        lambda s: {f"_orig_mod.{key}": value for key, value in s.items()},
        lambda s: {
            key.replace("blocks.0", "blocks.0._checkpoint_wrapped_module"): v
            for key, v in s.items()
        },
    ):
        model, result = load(change)
        assert result == ([], [])
        equal(model, source, table=False)
        assert torch.equal(model.table, torch.ones(3, device=DEVICE))
    # Wrappers of the model itself.
    model = Net().to(DEVICE)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    wrapped(model, mesh=mesh)
    assert load_full_state_dict(model, state if rank == 0 else None) == ([], [])
    equal(model, source, table=False)
    # Dtypes become the model's.
    model, _ = load(
        lambda s: {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in s.items()
        },
        lambda: Net().to(DEVICE, torch.bfloat16),
    )
    assert model.scale.dtype == torch.bfloat16
    assert torch.equal(model.embed.weight.full_tensor().cpu(), source.embed.weight.bfloat16())
    # Not strict.
    model, result = load(lambda s: {**without("scale")(s), "more": torch.ones(2)}, strict=False)
    assert result == (["scale"], ["more"])
    assert model.scale.full_tensor().item() == 1.0
    assert torch.equal(model.norm.weight.full_tensor().cpu(), source.norm.weight)


def check_mistakes(rank, world_size):
    """Named on every rank, and nothing is changed."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    state = trained().state_dict()
    model = wrapped(Net().to(DEVICE), mesh=mesh)
    before = {name: whole(value).clone() for name, value in model.named_parameters()}
    sharded = distribute_tensor(state["norm.bias"].to(DEVICE), mesh, [Shard(0)])
    for match, change in (
        (r"missing are \['scale'\], and nothing wants \['other'\]", {"scale": None, "other": 1}),
        (r"norm.bias has shape \(5,\), but its target has \(6,\)", {"norm.bias": torch.ones(5)}),
        (
            "norm.num_batches_tracked is torch.float32, which does not become torch.int64",
            {"norm.num_batches_tracked": torch.ones(())},
        ),
        ("norm.bias is a DTensor", {"norm.bias": sharded}),
        ("norm.bias is a tensor on one side only", {"norm.bias": 3}),
        ("embed.weight and head.weight are one parameter", {"head.weight": torch.ones(7, 6)}),
    ):
        changed = {k: v for k, v in {**state, **change}.items() if v is not None}
        for from_rank0 in (True, False):
            given = None if from_rank0 and rank else changed
            with pytest.raises((ValueError, RuntimeError), match=match):
                load_full_state_dict(model, given, from_rank0=from_rank0)
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), before[name]), name
    with pytest.raises((TypeError, RuntimeError), match="state_dict is a NoneType"):
        load_full_state_dict(model, None)
    if world_size > 1:
        with pytest.raises((TypeError, RuntimeError), match="state_dict is a str"):
            load_full_state_dict(model, "x" if rank == 1 else state, from_rank0=False)
    with pytest.raises(TypeError, match="model is a OrderedDict"):
        load_full_state_dict(state, state)
    # On meta: what the state does not have would be garbage.
    empty = wrapped(Net("meta"), mesh=mesh)
    with pytest.raises(ValueError, match="no values for table, which are on the meta device"):
        load_full_state_dict(empty, state if rank == 0 else None)
    some = {key: value for key, value in state.items() if key != "scale"}
    with pytest.raises(ValueError, match="no values for scale, table"):
        load_full_state_dict(empty, some if rank == 0 else None, strict=False)
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))


def check_memory(rank, world_size):
    """Beside the shards, no more than the largest parameter (row 85)."""
    mesh = init_device_mesh(DEVICE, (world_size,))

    def make():
        return nn.Sequential(*(nn.Linear(120, 100 + i) for i in range(4)), nn.Linear(120, 300))

    for layer in (model := make().to(DEVICE)):
        fully_shard(layer, mesh=mesh)
    state = {name: torch.rand_like(value) for name, value in make().state_dict().items()}
    largest = max(value.nbytes for value in state.values())
    with PeakBytes() as memory:
        load_full_state_dict(model, state if rank == 0 else None)
    # gloo's thread may hold the tensor before for a moment: of the others, none is that large.
    assert memory.peak <= 1.5 * largest, (memory.peak, largest)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor().cpu(), state[name].cpu())


def check_mixed_model(rank, world_size):
    """Wrapped, ignored, and stock DTensor parameters in one model."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    reference = build(seed=9)
    model = build().to(DEVICE)
    model.head.weight = nn.Parameter(
        distribute_tensor(model.head.weight.detach(), mesh, [Shard(1)])
    )
    model.norm.weight = nn.Parameter(
        distribute_tensor(model.norm.weight.detach(), mesh, [Replicate()])
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params={layer.up.bias})
    load_full_state_dict(model, reference.state_dict() if rank == 0 else None)
    for name, value in reference.state_dict().items():
        assert torch.equal(whole(model.state_dict()[name]).cpu(), value), name


def check_all(rank, world_size):
    check_load(rank, world_size)
    check_like_torch(rank, world_size)
    check_names_and_dtypes(rank, world_size)
    check_mistakes(rank, world_size)
    check_memory(rank, world_size)
    check_mixed_model(rank, world_size)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_full_states_fill_models(run_ranks, world_size):
    run_ranks(check_all, world_size)


def test_no_process_group_is_said_so():
    with pytest.raises(RuntimeError, match="init_process_group"):
        load_full_state_dict(nn.Linear(2, 2), {})
