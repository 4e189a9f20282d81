# SPDX-License-Identifier: Apache-2.0
"""Units whose parameters lie in several lanes train as those in one buffer do."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from testing.collectives import CountCollectives
from testing.models import batch, build, loss_of, reference_step
from testing.ranks import DEVICE
from vescale.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    inspect,
    no_sync,
)
from vescale.fsdp.units import param_groups

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
NAMES = ("replicate", "shard")
LANES = [2, 3]


def wrapped(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def train(model, rank, steps=3):
    """Train with one accumulated micro-batch that is not reduced; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        if step == 1:
            with no_sync(model):
                loss_of(model, batch(99, rank, DEVICE)).backward()
        loss = loss_of(model, batch(step, rank, DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_reference(rank, world_size, steps=3):
    """Do the same in one process."""
    model = build(0).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        if step == 1:
            reference_step(model, 99, world_size, DEVICE)
        losses.append(reference_step(model, step, world_size, DEVICE)[rank])
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def lane_counts(model):
    return [len(group.plan.lanes) for group in param_groups(model)]


def settings(world_size):
    """Return arguments of fully_shard, and of set_collectives."""
    yield {}, "auto"
    yield {}, "torch"
    yield {"reshard_after_forward": False}, "auto"
    if world_size % 2 == 0:
        yield {"mesh": init_device_mesh(DEVICE, (world_size,)), "reshard_after_forward": 2}, "auto"
        mesh = init_device_mesh(DEVICE, (2, world_size // 2), mesh_dim_names=NAMES)
        yield {"mesh": mesh}, "torch"


def check_training(rank, world_size):
    reference, expected = train_reference(rank, world_size)
    for lanes in LANES:
        for options, kind in settings(world_size):
            model = wrapped(build(0).to(DEVICE), lanes=lanes, **options)
            assert lane_counts(model) == [lanes] * 4
            model.set_collectives(kind)
            torch.testing.assert_close(train(model, rank), expected, **CLOSE)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(
                    value.full_tensor(), reference.get_parameter(name).detach(), **CLOSE, msg=name
                )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_and_weights_equal_one_process(run_ranks, world_size):
    run_ranks(check_training, world_size)


def check_bits(rank, world_size):
    """A lane changes no value, not even by rounding: which rank owns what does not matter."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for lanes in (1, *LANES):
        model = wrapped(build(0).to(DEVICE), lanes=lanes, mp_policy=policy)
        losses = train(model, rank)
        twin = copy.deepcopy(model)
        assert lane_counts(twin) == [lanes] * 4
        results.append((losses, [v.full_tensor() for v in twin.state_dict().values()]))
    for losses, values in results[1:]:
        assert losses == results[0][0]
        for value, first in zip(values, results[0][1], strict=True):
            assert torch.equal(value, first)


class OneOf(nn.Module):
    """Runs one of its layers."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(build(0, layers=layers).layers)

    def forward(self, index, x):
        return self.layers[index](x)


def check_unused(rank, world_size):
    """Flags travel with one lane and speak for all of them."""
    for lanes in LANES:
        model = fully_shard(OneOf(3).to(DEVICE), lanes=lanes)
        model(min(rank, 1), torch.ones(2, 13, device=DEVICE)).sum().backward()
        for name, param in model.named_parameters():
            assert (param.grad is not None) == ("layers.2" not in name), name


def check_moves(rank, world_size):
    """Casting, meta weights and loading from other lanes find every part."""
    full = build(1).to(DEVICE)
    model = wrapped(build(0).to(DEVICE), lanes=3)
    model.load_state_dict(wrapped(copy.deepcopy(full), lanes=2).state_dict())
    model.double()
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), full.get_parameter(name).detach().double()), name
    with torch.device("meta"):
        empty = build(0)
    empty = wrapped(empty, lanes=2).to_empty(device=DEVICE)
    empty.load_state_dict(full.state_dict())
    for name, value in empty.state_dict().items():
        assert torch.equal(value.full_tensor(), full.get_parameter(name).detach()), name


def check_all(rank, world_size):
    check_bits(rank, world_size)
    check_unused(rank, world_size)
    check_moves(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_lanes_change_no_bit_and_no_flag(run_ranks, world_size):
    run_ranks(check_all, world_size)


class LongRows(nn.Module):
    """Three matrices, of which the one with the longest rows would set the shards of all."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((2, 19011), (3, 37348), (2, 6102))
        self.matrices = nn.ParameterList(torch.randn(s, generator=generator) for s in shapes)

    def forward(self, x):
        return sum((matrix * x).square().mean() for matrix in self.matrices)


def check_auto(rank, world_size):
    models = {lanes: fully_shard(LongRows().to(DEVICE), lanes=lanes) for lanes in (1, 2)}
    auto = fully_shard(LongRows().to(DEVICE))
    assert lane_counts(auto) == [2]
    plans = [param_groups(m)[0].plan for m in (models[1], auto)]
    assert plans[1].buffer_numel < 0.85 * plans[0].buffer_numel
    gathered = {}
    for lanes, model in models.items():
        model.set_collectives("torch")
        with CountCollectives() as count:
            model(1.0 + rank).backward()
        assert count.total == 2, "one launch gathers all lanes, one reduces them"
        gathered[lanes] = count.nbytes
    assert gathered[2] < 0.85 * gathered[1]
    for param, expected in zip(models[1].parameters(), models[2].parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad.full_tensor(), **CLOSE)


@pytest.mark.parametrize("world_size", [3, 4])
def test_lanes_are_used_where_they_save_enough(run_ranks, world_size):
    run_ranks(check_auto, world_size)


class Layer(nn.Module):
    """The matrices of a layer of Llama-3-70B, those of attention as two."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8192, 10240, bias=False)
        self.out = nn.Linear(8192, 8192, bias=False)
        self.gate, self.up = (nn.Linear(8192, 28672, bias=False) for _ in range(2))
        self.down = nn.Linear(28672, 8192, bias=False)

    def forward(self, x):
        return self.down(self.gate(x) * self.up(x))


def test_large_worlds_move_less_padding(fake_group):
    fake_group(1024, rank=700)
    plans = {}
    for lanes in (1, "auto"):
        with torch.device("meta"):
            layer = fully_shard(Layer(), lanes=lanes)
        plans[lanes] = param_groups(layer)[0].plan
        assert (f"{len(plans[lanes].lanes)} lanes" in str(inspect.layout(layer))) == (lanes != 1)
    assert len(plans["auto"].lanes) > 1
    assert plans["auto"].padding < plans[1].padding / 2


@pytest.mark.parametrize("lanes", [0, 4, "two", True, 2.0, None])
def test_other_numbers_of_lanes_are_refused(fake_group, lanes):
    fake_group(4)
    with pytest.raises(ValueError, match=f"lanes={lanes!r}; pass 'auto' or an integer from 1 to 3"):
        fully_shard(nn.Linear(4, 4), lanes=lanes)


def check_disagreement(rank, world_size):
    with pytest.raises(RuntimeError, match=f"lanes={1 + (rank == 0)}"):
        fully_shard(nn.Linear(4, 4).to(DEVICE), lanes=1 + (rank == 0))


def test_ranks_that_ask_for_other_lanes_are_told(run_ranks):
    run_ranks(check_disagreement, 2)
