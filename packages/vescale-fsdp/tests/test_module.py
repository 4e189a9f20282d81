# SPDX-License-Identifier: Apache-2.0
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard
from vescale.fsdp import Elements, MixedPrecisionPolicy, Rows, Whole, fully_shard, no_sync
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.optim import Muon
from vescale.fsdp.param_group import ParamGroup, State
from vescale.fsdp.units import param_groups, unit_of


def wrapped(seed=0, tied=True, device=DEVICE, **options):
    model = build(seed, tied=tied).to(device)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def full(model):
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }


def assert_same(model, expected):
    got = full(model)
    assert list(got) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value.to(got[name].device), rtol=0, atol=0, msg=name)


def assert_views_of_the_buffer(model):
    for group in param_groups(model):
        start = group.weights.shard.untyped_storage().data_ptr()
        for item in group.managed:
            local = item.sharded.to_local()
            assert local.numel() == 0 or local.untyped_storage().data_ptr() == start


def train_a_step(model, rank):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = loss_of(model, batch(0, rank, DEVICE))
    loss.backward()
    optimizer.step()
    return loss.item()


def check_state_dict(rank, world_size):
    plain = build(1, tied=True).to(DEVICE)
    model = wrapped(0, granularity=Elements())
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(isinstance(v.placements[0], RaggedShard) for v in state.values())
    # Also between forward and backward, with the root gathered.
    loss = loss_of(model, batch(0, rank, DEVICE))
    assert all(isinstance(v, DTensor) for v in model.state_dict().values())
    loss.backward()
    assert model.norm.weight.grad is not None
    model.zero_grad()
    # Plain full tensors, as torch.save of an unsharded model gives them.
    result = model.load_state_dict(plain.state_dict())
    assert not result.missing_keys
    assert_same(model, plain.state_dict())
    # DTensors of another layout.
    other = wrapped(2, granularity=Rows(3))
    other.load_state_dict(model.state_dict())
    assert_same(other, plain.state_dict())
    # assign=True keeps the parameters that optimizers hold.
    kept = dict(other.named_parameters())
    other.load_state_dict(build(3, tied=True).state_dict(), assign=True)
    assert all(other.get_parameter(name) is param for name, param in kept.items())
    assert_same(other, build(3, tied=True).state_dict())
    assert_views_of_the_buffer(other)
    with pytest.raises(RuntimeError, match=r"size mismatch for norm\.weight"):
        other.load_state_dict({"norm.weight": torch.zeros(4)}, strict=False)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**plain.state_dict(), "more": torch.zeros(4)})


def check_checkpoint(rank, world_size, folder):
    model = wrapped(0, granularity=Rows(3))
    train_a_step(model, rank)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    dist.barrier()
    for options in ({"granularity": Elements()}, {"granularity": Whole()}):
        other = wrapped(5, **options)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        assert_same(other, full(model))
    plain = build(7, tied=True).to(DEVICE)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    assert_same(model, state["model"])


def check_meta(rank, world_size):
    """Meta parameters stay meta until materialised, then train as if they never had been."""
    reference = wrapped(4)
    expected = full(reference)
    for how in ("to_empty", "assign"):
        model = wrapped(4, device="meta")
        assert all(p.is_meta for p in model.parameters())
        with pytest.raises(RuntimeError, match=r"'.+' still .*meta device.*init_empty.*to_empty"):
            model(batch(0, rank, DEVICE))
        if how == "to_empty":
            model.to_empty(device=DEVICE)
        model.load_state_dict(expected, assign=how == "assign")
        assert all(p.device.type == DEVICE for p in model.parameters())
        assert_views_of_the_buffer(model)
        assert_same(model, expected)
        loss = loss_of(model, batch(0, rank, DEVICE))
        other = loss_of(reference, batch(0, rank, DEVICE))
        torch.testing.assert_close(loss, other, rtol=0, atol=0)
    # Initialised after to_empty: as one process would, from equal generators.
    torch.manual_seed(8)
    one = nn.Linear(6, 5).to(DEVICE)
    one.reset_parameters()
    sharded = fully_shard(nn.Linear(6, 5, device="meta"))
    sharded.to_empty(device=DEVICE)
    torch.manual_seed(8)
    nn.Linear(6, 5).to(DEVICE)
    sharded.reset_parameters()
    assert_same(sharded, one.state_dict())


def check_apply(rank, world_size):
    model = wrapped(0)
    expected = full(model)
    kept = dict(model.named_parameters())
    model.double()
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert_views_of_the_buffer(model)
    train_a_step(model, rank)
    model.load_state_dict(expected)
    model.bfloat16()
    assert_views_of_the_buffer(model)
    assert all(model.get_parameter(n) is p for n, p in kept.items())
    train_a_step(model, rank)
    assert model.norm.weight.grad.dtype == torch.bfloat16


def check_submodule_moves(rank, world_size):
    """A submodule that is cast or materialised by itself stays part of the buffer."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(DEVICE))
    model[0].double().float()
    with torch.no_grad():
        model[0].weight.fill_(0)
        model[0].bias.fill_(1)
    x = torch.ones(3, 4, device=DEVICE)
    with torch.no_grad():
        model[1].bias.fill_(0)
        model[1].weight.fill_(1)
    assert torch.equal(model(x), torch.full((3, 2), 4.0, device=DEVICE))
    assert_views_of_the_buffer(model)
    # A move that changes nothing is noticed once, not at every gather.
    model[0].to(DEVICE)
    model(x)
    with mock.patch.object(ParamGroup, "adopt_moved") as adopt:
        model(x)
    adopt.assert_not_called()
    # Gradients that no backward has reduced would be lost.
    with no_sync(model):
        model(x).sum().backward()
    model[0].double()
    with pytest.raises(RuntimeError, match="no backward has reduced yet"):
        model(x)
    empty = fully_shard(nn.Sequential(nn.Linear(4, 4, device="meta")))
    empty[0].to_empty(device=DEVICE)
    nn.init.zeros_(empty[0].weight)
    nn.init.ones_(empty[0].bias)
    assert torch.equal(empty(x), torch.ones(3, 4, device=DEVICE))


def check_kept_root_is_fresh(rank, world_size):
    """A forward for logging, then a step: the next forward sees the new weights."""
    model = fully_shard(nn.Linear(4, 1, bias=False).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    x = torch.ones(2, 4, device=DEVICE)
    model(x).sum().backward()
    before = model(x).detach().clone()  # leaves the root gathered
    optimizer.step()
    assert not torch.equal(model(x).detach(), before)


def check_kept_units_are_fresh(rank, world_size):
    """Units that are kept on request notice a step of any kind of optimizer."""
    x = torch.ones(2, 4, device=DEVICE)
    for make in (
        lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
        lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
        lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
        lambda params: Muon(params, lr=0.1),
    ):
        model = fully_shard(nn.Linear(4, 4, bias=False).to(DEVICE), reshard_after_forward=False)
        optimizer = make(model.parameters())
        model(x).square().sum().backward()
        with torch.no_grad():
            before = model(x).clone()  # leaves it gathered
            optimizer.step()
            assert not torch.equal(model(x), before), optimizer
            assert torch.equal(model(x), x @ model.state_dict()["weight"].full_tensor().t())


def check_unshard_ahead(rank, world_size):
    """What was gathered by hand, awaited or not, is what the next forward uses."""
    for async_op in (False, True):
        model = fully_shard(nn.Linear(4, 4).to(DEVICE))
        model(torch.ones(2, 4, device=DEVICE)).sum().backward()
        model.unshard(async_op=async_op)
        with mock.patch.object(DBuffer, "all_gather", side_effect=AssertionError("again")):
            model(torch.ones(2, 4, device=DEVICE)).sum().backward()


def check_by_hand(rank, world_size):
    model = wrapped(0)
    layer = model.layers[0]
    shape = layer.up.weight.shape
    handle = layer.unshard(async_op=True)
    handle.wait()
    handle.wait()
    assert type(layer.up.weight) is nn.Parameter
    assert layer.up.weight.shape == shape
    layer.reshard()
    assert isinstance(layer.up.weight, DTensor)
    assert layer.unshard() is None
    layer.reshard()
    layer.unshard(async_op=True)
    layer.reshard()  # also one that was never waited for
    assert param_groups(layer)[0].state is State.SHARDED
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    loss_of(model, batch(0, rank, DEVICE)).backward()
    assert all(g.state is State.GATHERED for g in param_groups(model))
    model.set_reshard_after_backward(True, recurse=False)
    model.set_reshard_after_forward(True)
    model.reshard()
    assert param_groups(model)[0].state is State.SHARDED
    model.set_requires_gradient_sync(False, recurse=False)
    assert param_groups(layer)[0].reduce_options.sync
    with pytest.raises(TypeError, match=r"reshard_after_forward=2 is a int; pass True or False"):
        model.set_reshard_after_forward(2)
    with pytest.raises(TypeError, match="requires_gradient_sync=1 is a int; pass True or False"):
        model.set_requires_gradient_sync(1)
    with pytest.raises(TypeError, match="recurse=None"):
        model.set_reshard_after_backward(True, recurse=None)
    with pytest.raises(TypeError, match="no_sync got a NoneType"), no_sync(None):
        pass
    with pytest.raises(ValueError, match="no module in Linear is wrapped"), no_sync(layer.up):
        pass
    with pytest.raises(ValueError, match="Linear is not wrapped"):
        unit_of(layer.up)


def check_casts(rank, world_size):
    """Inputs and outputs are cast as the policy says; float64 inputs of a list too."""

    class Echo(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, xs, *, flag):
            assert flag is True
            return {"seen": [x.dtype for x in xs], "out": xs[0] * self.weight}

    xs = [torch.ones(3, dtype=torch.float64, device=DEVICE), torch.ones(3, dtype=torch.int64)]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    out = fully_shard(Echo().to(DEVICE), mp_policy=policy)(xs, flag=True)
    assert out["seen"] == [torch.bfloat16, torch.int64]
    assert out["out"].dtype == torch.float32


def check_all(rank, world_size, folder):
    check_state_dict(rank, world_size)
    check_checkpoint(rank, world_size, folder)
    check_meta(rank, world_size)
    check_apply(rank, world_size)
    check_by_hand(rank, world_size)
    check_submodule_moves(rank, world_size)
    check_kept_root_is_fresh(rank, world_size)
    check_kept_units_are_fresh(rank, world_size)
    check_unshard_ahead(rank, world_size)
    check_casts(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_wrapped_module_saves_loads_moves_and_casts(run_ranks, tmp_path, world_size):
    run_ranks(check_all, world_size, str(tmp_path))
