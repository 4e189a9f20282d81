# SPDX-License-Identifier: Apache-2.0
"""Codes and scales through checkpoints: other numbers of ranks, uncast, bit for bit."""

import copy
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, init_device_mesh
from vescale.fsdp.optim import AdamW8bit

SHAPES = [(96, 64), (100, 70), (33,), (201, 33)]
OPTIONS = {"lr": 0.02, "stochastic_round": True}


def tensors_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(DEVICE, torch.bfloat16) for s in SHAPES]


def part_of(full, mesh, index):
    """Return this rank's rows, whole multiples of 32, other ones for every number of ranks."""
    rows = full.size(0)
    generator = torch.Generator().manual_seed(index * 10 + mesh.size())
    step = 32 if full.ndim == 2 else 1
    cuts = torch.randint(0, -(-rows // step) + 1, (mesh.size() - 1,), generator=generator)
    edges = [min(edge * step, rows) for edge in [0, *cuts.sort()[0].tolist(), rows]]
    cut = RaggedShard((0,), [b - a for a, b in itertools.pairwise(edges)])
    start, end = cut.split(full.shape, mesh.get_local_rank())
    return DTensor.from_local(full.reshape(-1)[start:end].clone(), mesh, [cut], shape=full.shape)


def build(mesh=None):
    model = nn.Module()
    for i, full in enumerate(tensors_of(0)):
        model.register_parameter(
            f"w{i}", nn.Parameter(full if mesh is None else part_of(full, mesh, i))
        )
    return model, AdamW8bit(model.named_parameters(), **OPTIONS)


def train(model, optimizer, steps, mesh=None):
    for step in steps:
        for i, (param, grad) in enumerate(
            zip(model.parameters(), tensors_of(1 + step), strict=True)
        ):
            param.grad = grad if mesh is None else part_of(grad, mesh, i)
        optimizer.step()


def assert_follows(model, optimizer, steps):
    """Compare parameters and all state with a process that trained ``steps`` without a stop."""
    alone, expected = build()
    train(alone, expected, range(steps))
    for param, whole in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), whole)
        mine, theirs = optimizer.state[param], expected.state[whole]
        assert list(mine) == list(theirs)
        for name, value in theirs.items():
            assert mine[name].dtype == value.dtype
            full = mine[name] if name == "step" else mine[name].full_tensor()
            assert torch.equal(full, value), name


def state_of(model, optimizer):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def check_save(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model, optimizer = build(mesh)
    train(model, optimizer, range(2), mesh)
    dcp.save(state_of(model, optimizer), checkpoint_id=path)


def check_load(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model, optimizer = build(mesh)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_follows(model, optimizer, 2)
    train(model, optimizer, range(2, 4), mesh)
    assert_follows(model, optimizer, 4)


def test_codes_saved_on_four_ranks_load_on_others(run_ranks, tmp_path):
    """C6: save on 4, load on 1, 2, 3: codes, scales and the next steps are bitwise the same."""
    run_ranks(check_save, 4, tmp_path)
    for world_size in (1, 2, 3):
        run_ranks(check_load, world_size, tmp_path)


def test_load_state_dict_never_casts():
    model, optimizer = build()
    train(model, optimizer, range(2))
    twin, resumed = build()
    seen = []
    resumed.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[twin.w0]["exp_avg_codes"].dtype)
    )
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen == [torch.uint8]
    for net, opt in ((model, optimizer), (twin, resumed)):
        train(net, opt, range(2, 4))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
        for name, value in optimizer.state[one].items():
            assert value.dtype == resumed.state[other][name].dtype
            assert torch.equal(value, resumed.state[other][name])


def test_state_of_torch_adamw_is_quantized():
    model = nn.Linear(64, 96)
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        plain.step()
    ours = AdamW8bit(model.parameters())
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert ours.param_groups[0]["lr"] == 0.01
    assert ours.param_groups[0]["block"] == (32, 32)
    state = ours.state[model.weight]
    assert set(state) == {
        "step", "exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scale", "exp_avg_sq_scale"
    }  # fmt: skip
    assert int(state["step"]) == 3
    assert state["exp_avg_scale"].max() == plain.state[model.weight]["exp_avg"].abs().max()
    assert torch.equal(ours.state[model.bias]["exp_avg"], plain.state[model.bias]["exp_avg"])
    model(torch.randn(4, 64)).square().mean().backward()
    before = model.weight.detach().clone()
    ours.step()
    assert 0 < (model.weight - before).abs().max() < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exp_avg_codes": None}, "lacks"),
        ({"exp_avg_scale": torch.zeros(3, 3)}, "exp_avg_scale has"),
        ({"exp_avg_scale": torch.zeros(3, 2, dtype=torch.bfloat16)}, "exp_avg_scale has"),
        ({"exp_avg_codes": torch.zeros(96, 64)}, "expected torch.uint8"),
        ({"exp_avg_codes": torch.zeros(64, 96, dtype=torch.uint8)}, "its exp_avg_codes has"),
    ],
)
def test_state_that_does_not_fit_is_refused(change, message):
    _, optimizer = build()
    saved = optimizer.state_dict()
    state = dict(saved["state"][0])
    for name, value in change.items():
        state[name] = value
        if value is None:
            del state[name]
    saved["state"][0] = state
    with pytest.raises(ValueError, match=f"'w0'.*{message}"):
        optimizer.load_state_dict(saved)


def test_other_blocks_than_the_saved_ones_come_with_the_group():
    param = nn.Parameter(torch.zeros(64, 64))
    saved = AdamW8bit([param], block=256).state_dict()
    ours = AdamW8bit([param])
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["block"] == 256
    assert ours.state[param]["exp_avg_scale"].shape == (16, 1)
