# SPDX-License-Identifier: Apache-2.0
"""What is predicted from shapes is what wrapped models take, byte for byte."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import MixedPrecisionPolicy, Rows, fully_shard, granularity_for
from vescale.fsdp.optim import SOAP, AdamW8bit, Muon, split_params
from vescale.fsdp.simulate import Setup, divisors, simulate
from vescale.fsdp.simulate.memory import OPTIMIZERS, most, state_nbytes
from vescale.fsdp.simulate.shapes import Unit, group_by_layer, shipped_units
from vescale.fsdp.units import param_groups

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storages(tensors):
    """Return the bytes of the memory behind ``tensors``, each once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def state_of(optimizers):
    """Return the bytes of all state but step counters."""
    return sum(
        local(value).nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )


def optimizers_of(model, kind):
    if kind == "adamw":
        return [torch.optim.AdamW(model.parameters())]
    if kind == "adamw8bit":
        return [AdamW8bit(model.named_parameters())]
    matrices, rest = split_params(model)
    return [(SOAP if kind == "soap" else Muon)(matrices), torch.optim.AdamW(rest)]


def check(rank, world_size, kind, setup):
    model = build(0, width=72).to(DEVICE)
    shapes = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    simulation = simulate(group_by_layer(shapes), setup)
    options = {"mp_policy": POLICY, "granularity": setup.granularity or granularity_for(kind)}
    if setup.replicas > 1:
        options["mesh"] = init_device_mesh(
            DEVICE, (setup.replicas, setup.ranks), mesh_dim_names=("replicate", "shard")
        )
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizers = optimizers_of(model, kind)
    loss_of(model, batch(0, rank, DEVICE)).backward()
    for optimizer in optimizers:
        optimizer.step()
    groups = param_groups(model)
    parameters = sum(group.weights.shard.nbytes for group in groups)
    assert parameters == simulation.parameters_nbytes
    grads = storages(
        local(p.grad) for p in model.parameters() if p.numel() and local(p.grad).numel()
    )
    assert grads == simulation.gradients_nbytes
    state = torch.tensor(state_of(optimizers))
    dist.all_reduce(state, dist.ReduceOp.MAX)
    assert state.item() == simulation.optimizer_nbytes
    by_name = {cost.unit.name: cost for cost in simulation.units}
    for group in groups:
        cost = by_name["layers" if group.name else "root"]
        group.weights.all_gather()
        group.weights.wait_gather()
        assert group.weights.full.nbytes == cost.gathered_nbytes
        group.weights.free_full()
        buffer = group.reduction._gradients()._buffer
        assert buffer.slices.full_numel * buffer.full_dtype.itemsize == cost.reduced_nbytes
        assert len(group.plan.lanes) == len(cost.plan.lanes)


def check_all(rank, world_size):
    for kind in OPTIMIZERS:
        check(rank, world_size, kind, Setup(world_size, optimizer=kind))
    check(rank, world_size, "adamw", Setup(world_size, granularity=Rows(8), lanes="auto"))
    if world_size == 4:
        check(rank, world_size, "adamw", Setup(world_size, shards=2))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_are_those_of_wrapped_models(run_ranks, world_size):
    run_ranks(check_all, world_size)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 20)), max_size=8))
def test_most_is_the_largest_sum_over_ranks(spans):
    sums = [
        sum(value for first, ranks, value in spans if first <= rank < first + ranks)
        for rank in range(20)
    ]
    assert most(spans) == max(sums)


def test_traffic_follows_the_groups():
    units = shipped_units("llama3-8b")
    alone = simulate(units, Setup(64))
    shared = simulate(units, Setup(64, shards=8))
    assert alone.traffic_nbytes[1] == 0
    one_rank = simulate(units, Setup(64, shards=1))
    assert one_rank.traffic_nbytes[0] == 0
    numel = alone.numel
    # Two gathers of bfloat16 and a reduction of float32, all but a rank's own part.
    assert alone.traffic_nbytes[0] == pytest.approx(8 * numel * 63 / 64, rel=0.01)
    assert shared.traffic_nbytes[0] == pytest.approx(8 * numel * 7 / 8, rel=0.01)
    assert shared.traffic_nbytes[1] == pytest.approx(2 * 4 * numel / 8 * 7 / 8, rel=0.01)
    assert one_rank.traffic_nbytes[1] == pytest.approx(2 * 4 * numel * 63 / 64, rel=0.01)
    assert alone.lasting_nbytes == pytest.approx(16 * numel / 64, rel=0.01)
    assert one_rank.lasting_nbytes == pytest.approx(16 * numel, rel=0.01)


def test_larger_units_hold_more_at_once():
    units = shipped_units("llama3-8b")
    one, four = (simulate(units, Setup(64, layers=layers)) for layers in (1, 4))
    assert one.numel == four.numel
    layers = next(cost for cost in four.units if cost.unit.name == "layer x 4")
    assert four.gathered_nbytes == 2 * layers.gathered_nbytes
    assert four.reduced_nbytes == 2 * layers.reduced_nbytes


def test_eight_bit_state_counts_codes_and_scales():
    unit = Unit("layer", 2, (("w", (128, 128)), ("bias", (128,))))
    codes = state_nbytes("adamw8bit", unit, 0, torch.bfloat16)
    assert codes(32 * 128) == 2 * 32 * 128 + 2 * 4 * 4
    assert codes(0) == 0
    assert state_nbytes("adamw8bit", unit, 1, torch.bfloat16)(128) == 8 * 128
    assert state_nbytes("adamw", unit, 1, torch.bfloat16)(128) == 4 * 128
    assert state_nbytes("muon", unit, 0, torch.float32)(100) == 400
    assert state_nbytes("muon", unit, 1, torch.float32)(100) == 800


def test_the_roots_of_soap_hold_the_state_of_whole_matrices():
    unit = Unit("layer", 3, (("w", (1024, 1024)), ("bias", (1024,))))
    matrix, bias = 6 * 4 * 1024 * 1024, 2 * 4 * 1024
    for ranks, most_matrices in ((1, 3), (2, 2), (3, 1), (6, 1)):
        simulation = simulate([unit], Setup(ranks, optimizer="soap"))
        spread = simulation.optimizer_nbytes - most_matrices * matrix
        assert 0 <= spread <= 3 * bias


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size=0, expected at least 1"),
        ({"world_size": 8, "layers": 0}, "layers=0, expected at least 1"),
        ({"world_size": 8, "shards": 3}, r"shards=3 does not divide the 8 ranks.*\[1, 2, 4, 8\]"),
        ({"world_size": 8, "optimizer": "sgd"}, "optimizer='sgd', expected one of"),
        ({"world_size": 8, "lanes": 7}, "lanes=7; pass 'auto' or an integer"),
    ],
)
def test_wrong_setups_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Setup(**options)


@given(st.integers(1, 2000))
def test_divisors(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_a_model_without_parameters_costs_nothing():
    simulation = simulate(group_by_layer([]), Setup(4))
    assert (simulation.padding, simulation.peak_nbytes) == (0.0, 0)
    assert simulation.traffic_nbytes == (0, 0)
