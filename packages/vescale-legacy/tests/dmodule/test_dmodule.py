# SPDX-License-Identifier: Apache-2.0
"""Parallelized modules compute what one device computes, and can be asked, saved and loaded."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from testing.collectives import CountCollectives
from testing.ranks import DEVICE
from vescale.legacy.dmodule import PlacementsInterface, is_dmodule, parallelize_module
from vescale.legacy.dmodule._dmodule import DModule
from vescale.legacy.dtensor import DTensor, Partial, Replicate, Shard, redistribute_dtensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Block(nn.Module):
    """[batch, sequence, 8] -> the same."""

    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(8)
        self.fc1 = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(self.ln(x))))


PARAMETERS = {r"fc1\.weight": [S0], "fc1.bias": [S0], "fc2.weight": [S1]}
TP = {
    "parameter": PARAMETERS,
    "forward": {"input": [[R]], "fc2.output": [[R]], "output": [[R]]},
}
TP_SP = {
    "parameter": PARAMETERS,
    "forward": {"input": [[S1]], "fc1.input": [[R]], "fc2.output": [[S1]], "output": [[R]]},
}


def build(seed=0):
    torch.manual_seed(seed)
    return Block().to(DEVICE)


def full(x):
    return redistribute_dtensor(x, placements=[R] * x.device_mesh.ndim).to_local() + 0


def check_training(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    x = torch.randn(2, 2 * world_size, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    reference = build()
    expected = reference(x)
    expected.square().sum().backward()
    for plan, partial in ((TP, []), (TP_SP, ["ln.weight", "ln.bias", "fc2.bias"])):
        model = build(seed=rank)  # the first rank's weights are what counts
        assert parallelize_module(model, mesh, plan) is model
        assert type(model) is Block
        assert is_dmodule(model)
        assert not is_dmodule(model.fc1)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                full(parameter.detach()), reference.get_parameter(name).detach(), rtol=0, atol=0
            )
        given = x if plan is TP else x.chunk(world_size, 1)[rank]
        out = model(given)
        assert out.placements == (R,)
        torch.testing.assert_close(full(out.detach()), expected.detach())
        out.to_local().square().sum().backward()
        assert sorted(name for name, _ in model.list_grad_sync()) == sorted(partial)
        if partial:  # without the sync the gradient is a term of that of one device
            assert not torch.allclose(model.ln.weight.grad.to_local(), reference.ln.weight.grad)
        model.start_grad_sync()
        model.finish_grad_sync()
        assert model.list_grad_sync() == []
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(full(parameter.grad), reference.get_parameter(name).grad)
    model.zero_grad()  # torch cannot copy a DTensor that is a gradient
    twin = copy.deepcopy(model)
    twin.ln.weight.data.zero_()
    assert full(model.ln.weight.detach()).unique().tolist() == [1.0]
    torch.testing.assert_close(full(twin(given)) - full(model(given)) != 0, torch.ones_like(x) > 0)


def test_tensor_and_sequence_parallel_equal_one_device(run_ranks):
    run_ranks(check_training, 2)


def check_states(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model, other = (parallelize_module(build(seed), mesh, TP) for seed in (0, 5))
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=False)
    other.load_state_dict(state)
    plain = parallelize_module(build(7), mesh, TP_SP)
    plain.load_state_dict({k: v.cpu() for k, v in build(0).state_dict().items()})
    for name, parameter in model.named_parameters():
        for same in (other, plain):
            found = same.get_parameter(name)
            assert found.placements == parameter.placements
            assert torch.equal(found.to_local(), parameter.to_local())
    with pytest.raises(NotImplementedError, match="assign"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    with pytest.warns(UserWarning, match="already"):
        assert parallelize_module(model, mesh) is model
    assert model.get_fwd_plan("fc2.output") == [PlacementsInterface((R,))]
    assert model.get_fwd_plan("fc1.output") is None
    lines = model.repr_params().splitlines()
    assert len(lines) == 6
    assert lines[2].split("  ")[0] == "fc1.weight"
    assert "S(0)" in lines[2]
    shape, parameters, forward = model.dump_mesh_plans(is_print=False)
    assert shape is mesh
    assert parameters["fc2.weight"].placements == (S1,)
    assert set(forward) == {"input", "output", "fc2.output"}


def test_states_and_questions(run_ranks):
    run_ranks(check_states, 2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.c = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.b(self.a(x))


def check_parameters(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model = Tied().to(DEVICE)
    with pytest.raises(ValueError, match=r"a\.weight and b\.weight are one parameter"):
        parallelize_module(model, mesh, {"parameter": {"a.weight": [S0]}})
    assert not isinstance(model.a.weight, DTensor)  # nothing was changed
    parallelize_module(model, mesh, {"parameter": {"[ab].weight": [S0], "c": [S0]}})
    assert model.a.weight is model.b.weight
    assert model.a.weight.placements == model.c.placements == (S0,)
    assert not model.c.requires_grad
    assert isinstance(model.table, DTensor)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert list(model.state_dict()) == ["c", "a.weight", "b.weight"]
    local = nn.Linear(4, 2, bias=False).to(DEVICE)
    parallelize_module(local, mesh, {"parameter": {"weight": [S0]}}, is_model_sharded=True)
    assert local.weight.shape == (2 * world_size, 4)
    with pytest.raises(KeyError, match="did you mean"):
        parallelize_module(Tied(), mesh, {"parameters": {}})


def test_parameters(run_ranks):
    run_ranks(check_parameters, 2)


def check_weight_in_forward(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    x = torch.ones(3, 8, device=DEVICE)
    reference = build().fc1
    reference(x).square().sum().backward()
    for entry, expected in (([R], S0), (PlacementsInterface([R], grad=[R]), R)):
        model = build().fc1
        plan = {"parameter": {"weight": [S0]}, "forward": {"weight": entry, "input": [[R]]}}
        parallelize_module(model, mesh, plan)
        out = model(x)
        assert out.placements == (R,)
        assert model.weight.placements == (S0,)
        out.to_local().square().sum().backward()
        assert model.weight.grad.placements == (expected,)
        torch.testing.assert_close(full(model.weight.grad), reference.weight.grad)


def test_a_parameter_is_used_in_another_layout(run_ranks):
    run_ranks(check_weight_in_forward, 2)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return torch.relu(self.a(x) + self.b(x))


def check_deferred(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    torch.manual_seed(0)
    reference = Sum().to(DEVICE)
    x = torch.randn(3, 4, device=DEVICE)
    parts = {"parameter": {"[ab].weight": [S1]}, "forward": {"input": [[S1]]}}
    given = x.chunk(world_size, 1)[rank].contiguous()
    counts = []
    for defer in (False, True):
        model = copy.deepcopy(reference)
        entry = [PlacementsInterface([R], defer_reshard=defer)]
        plan = {**parts, "forward": {**parts["forward"], "[ab].output": entry}}
        parallelize_module(model, mesh, plan)
        with CountCollectives() as comm:
            out = model(given)
        counts.append(sum(n for name, n in comm.counts.items() if "reduce" in name))
        torch.testing.assert_close(full(out), reference(x))
    assert counts == [2, 1]
    wrong = parallelize_module(copy.deepcopy(reference), mesh, parts)
    with pytest.raises(RuntimeError, match="implicit resharding"):
        wrong(given)


def test_deferred_results_are_reduced_once_and_forgotten_ones_raise(run_ranks):
    run_ranks(check_deferred, 2)


def test_the_class_is_only_a_name():
    with pytest.raises(RuntimeError, match="parallelize_module"):
        DModule()
    with pytest.raises(RuntimeError, match="no base class"):
        type("Mine", (DModule,), {})


def check_two_axes(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("DP", "TP"))
    model = build()
    parallelize_module(model, mesh, {"parameter": {"fc1.weight": [R, S0], "fc2.weight": [S0, S1]}})
    value = torch.ones(8, 8, device=DEVICE)
    model.fc2.weight.grad = DTensor.from_local(value, mesh, [Partial(), S1], run_check=False)
    model.fc1.weight.grad = DTensor.from_local(value, mesh, [R, S0])
    ln = torch.full((8,), float(rank), device=DEVICE)
    model.ln.weight.grad = DTensor.from_local(ln, mesh, [Partial(), Partial()], run_check=False)
    assert [name for name, _ in model.list_grad_sync()] == ["ln.weight", "fc2.weight"]
    model.start_grad_sync()
    with pytest.raises(RuntimeError, match="under way"):
        model.start_grad_sync()
    model.finish_grad_sync()
    assert model.ln.weight.grad.placements == (R, R)
    assert model.ln.weight.grad.to_local().unique().tolist() == [6.0]
    assert model.fc2.weight.grad.placements == (R, S1)
    assert model.fc2.weight.grad.to_local().unique().tolist() == [2.0]


def test_gradients_that_are_partial_on_some_of_two_mesh_dims(run_ranks):
    run_ranks(check_two_axes, 4, exact=True)
