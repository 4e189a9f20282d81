# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp_state
import torch.distributed.tensor as torch_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from testing.memory import PeakBytes
from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor
from vescale.dtensor.debug import CommDebugMode
from vescale.dtensor.state import full_state_dict, load_full_state_dict, match_full_state


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), device=DEVICE, dtype=torch.float32).view(shape)


WHOLES = {
    "ragged": numbers(12, 5000),
    "uneven": numbers(12, 5) + 1,
    "deep": numbers(5, 3, 4) + 2,
    "owned": numbers(7) + 3,
    "shard": numbers(6, 5) + 4,
    "stock": numbers(9, 2) + 5,
    "replica": numbers(3, 3) + 6,
    "scalar": numbers() + 7,
    "half": (numbers(12, 3) + 8).bfloat16(),
    "empty": numbers(0, 3),
    "plain": numbers(4) + 9,
}


def placements_of(world_size):
    zeros = [0] * (world_size - 2)
    return {
        "ragged": RaggedShard((0,), [1] * world_size),
        "uneven": RaggedShard((0,), [1, *zeros, 2]),
        "deep": RaggedShard((0, 1, 2), [7, *zeros, 53]),
        "owned": RaggedShard((), [0, *zeros, 1]),
        "shard": Shard(1),
        "stock": Shard(0),
        "replica": Replicate(),
        "scalar": RaggedShard((), [*zeros, 0, 1]),
        "half": RaggedShard((0, 1), [5, *zeros, 31]),
        "empty": RaggedShard((0,), [1] * world_size),
    }


def make(mesh, world_size, fill):
    state = {"step": 3, "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]}
    for name, placement in placements_of(world_size).items():
        build = torch_distribute_tensor if name == "stock" else distribute_tensor
        state[name] = build(fill(WHOLES[name].clone()), mesh, [placement], src_data_rank=None)
    return {**state, "plain": fill(WHOLES["plain"].clone())}


def check_out_and_in(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    state = make(mesh, world_size, lambda t: t)
    for options in ({}, {"cpu_offload": True}, {"rank0_only": True, "cpu_offload": True}):
        full = full_state_dict(state, **options)
        if options.get("rank0_only") and rank:
            assert full == {}
            continue
        assert full.keys() == state.keys()
        assert (full["step"], full["groups"]) == (3, state["groups"])
        for name, whole in WHOLES.items():
            assert type(full[name]) is torch.Tensor
            assert torch.equal(full[name].to(DEVICE), whole), name
    with CommDebugMode() as mode:
        full_state_dict({"uneven": state["uneven"]}, rank0_only=True)
    assert mode.get_total_counts() == 1
    for src in range(world_size):
        target = make(mesh, world_size, torch.zero_)
        target["step"], target["groups"][0]["lr"] = 0, 0.0
        target["half"] = target["half"].float()
        parts = {name: target[name] for name in WHOLES}
        full = None
        if rank == src:
            full = {**WHOLES, "step": 3, "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]}
        assert load_full_state_dict(target, full, src=src) is None
        assert (target["step"], target["groups"]) == (3, state["groups"])
        for name, whole in WHOLES.items():
            assert target[name] is parts[name]
            value = target[name]
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(value, whole.to(value.dtype)), name


def check_memory(rank, world_size):
    """In and out: beside the parts, never more than the largest whole tensor."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    names = [name for name in WHOLES if name != "plain"]
    largest = max(whole.nbytes for whole in WHOLES.values())
    target = make(mesh, world_size, torch.zero_)
    full = {**WHOLES, "step": 3, "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]}
    with PeakBytes() as memory:
        load_full_state_dict(target, full if rank == 0 else None)
    assert 0 < memory.peak <= largest + 8192, (memory.peak, largest)  # objects are sent as bytes
    for name in names:
        assert torch.equal(target[name].full_tensor(), WHOLES[name])
    with PeakBytes() as memory:
        full_state_dict(target, rank0_only=True)
    total = sum(whole.nbytes for whole in WHOLES.values())
    assert memory.peak <= (total + largest if rank == 0 else 2 * largest)
    with PeakBytes() as memory:
        for _ in range(2):
            torch.zeros(largest, dtype=torch.uint8)
    assert memory.peak == largest  # it does see what is freed


def check_mistakes(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    state = {"a": distribute_tensor(numbers(4, 3), mesh, [Shard(0)]), "n": 1}
    pending = DTensor.from_local(numbers(4, 3), mesh, [Partial()])
    whole_numbers = {"a": distribute_tensor(numbers(4, 3).int(), mesh, [Shard(0)])}
    nowhere = {"a": torch.empty(4, 3, device="meta")}
    cut = [RaggedShard((0,), (1,) * (world_size - 1) + (5 - world_size,))]
    torchs = torch_tensors.zeros(4, 3, device_mesh=mesh, placements=cut)
    for match, full, target in (
        (r"missing are \['n'\].*wants \['b'\]", {"a": numbers(4, 3), "b": 1}, state),
        (r"a has shape \(4, 2\)", {"a": numbers(4, 2), "n": 1}, state),
        (
            "a is torch.float32, which does not become torch.int32",
            {"a": numbers(4, 3)},
            whole_numbers,
        ),
        ("a is to be loaded .* meta", {"a": numbers(4, 3)}, nowhere),
        ("one side only", {"a": 1, "n": 1}, state),
        ("a is a DTensor", {"a": pending, "n": 1}, state),
        ("redistribute it first", {"a": numbers(4, 3)}, {"a": pending}),
        (r"missing are \['a', 'n'\]", None, state),
        (
            r"wants \['state.0.step'\]; an optimizer .*get_optimizer_state_dict",
            {"state": {0: {"step": 1}}, "lr": 1},
            {"state": {}, "lr": 1},
        ),
        ("a is ragged but of torch's own class", {"a": numbers(4, 3)}, {"a": torchs}),
        # Only one rank wants more than it gets: all of them are told.
        (r"missing are \['extra'\].*rank 1", {"a": numbers(4, 3), "n": 1}, state | {"extra": 1}),
    ):
        if "extra" in target and rank != 1:
            target = state
        before = copy.deepcopy(state)
        with pytest.raises(ValueError, match=match):
            load_full_state_dict(target, full if rank == 0 else None)
        assert torch.equal(before["a"].full_tensor(), state["a"].full_tensor())
    with CommDebugMode() as mode, pytest.raises(ValueError, match=r"x\.0 is .*Partial"):
        full_state_dict({"a": state["a"], "x": [pending]})
    assert mode.get_total_counts() == 0


def check_helpers_of_torch(rank, world_size):
    """Their whole states go out, and in by way of the sharded ones; theirs in has no hook."""
    mesh, options = init_device_mesh(DEVICE, (world_size,)), {"full_state_dict": True}
    units = [1, *[0] * (world_size - 2), 2]

    def train(seed, steps):
        torch.manual_seed(seed)
        module = torch.nn.Linear(4, 6, device=DEVICE)
        for name, param in [*module.named_parameters()]:
            x = distribute_tensor(param.detach(), mesh, [RaggedShard((0,), units)])
            module.register_parameter(name, torch.nn.Parameter(x))
        optimizer = torch.optim.AdamW(module.parameters(), lr=seed * 0.1)
        for _ in range(steps):
            for param in module.parameters():
                param.grad = param.detach().clone()
            optimizer.step()
        return module, optimizer

    module, optimizer = train(1, 2)
    full, full_optimizer = dcp_state.get_state_dict(
        module, optimizer, options=dcp_state.StateDictOptions(cpu_offload=True, **options)
    )
    for seed, steps in ((2, 1), (3, 0)):
        other, other_optimizer = train(seed, steps)
        load_full_state_dict(other.state_dict(), full)
        state = dcp_state.get_optimizer_state_dict(other, other_optimizer)
        load_full_state_dict(state, full_optimizer)
        dcp_state.set_optimizer_state_dict(other, other_optimizer, state)
        assert other_optimizer.param_groups[0]["lr"] == 0.1
        for p, q in zip(module.parameters(), other.parameters(), strict=True):
            mine, its = optimizer.state[p], other_optimizer.state[q]
            assert torch.equal(p.to_local(), q.to_local())
            assert torch.equal(mine["exp_avg"].to_local(), its["exp_avg"].to_local())
            assert mine["step"] == its["step"] == 2
    for broadcast in (False, True):
        how = dcp_state.StateDictOptions(broadcast_from_rank0=broadcast, **options)
        whole = {"weight": numbers(6, 4), "bias": numbers(6)}
        with pytest.raises(RuntimeError, match=r"unsupported placements|size of tensor"):
            dcp_state.set_model_state_dict(module, whole, options=how)


def check_own_and_partial_states(rank, world_size):
    """Every rank has the whole state; some keys are missing, some are too many."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    target = make(mesh, world_size, torch.zero_)
    full = {**WHOLES, "step": 3, "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]}
    with CommDebugMode() as mode:
        load_full_state_dict(target, full, src=None)
    assert mode.get_total_counts() == 2  # the ranks agree that it fits; no tensor travels
    for name, whole in WHOLES.items():
        value = target[name].full_tensor() if name != "plain" else target[name]
        assert torch.equal(value, whole), name
    some = {"a": torch.zeros(3, device=DEVICE), "b": torch.zeros(3, device=DEVICE), "c": 1}
    given = {"a": torch.ones(3), "x": torch.ones(3)} if rank == 0 else None
    with pytest.raises(ValueError, match=r"missing are \['b'\], and nothing wants \['x'\]"):
        match_full_state(some, given, optional={"c"})
    matched = match_full_state(some, given, strict=False, optional={"c"})
    assert (matched.missing, matched.unexpected, matched.absent) == (["b"], ["x"], ["b", "c"])
    assert some["a"].sum() == 0
    matched.copy_into(some)
    assert (some["a"].sum(), some["b"].sum(), some["c"]) == (3, 0, 1)


def check_line(rank, world_size):
    check_own_and_partial_states(rank, world_size)
    check_out_and_in(rank, world_size)
    check_memory(rank, world_size)
    check_mistakes(rank, world_size)
    check_helpers_of_torch(rank, world_size)


def check_square(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    ragged, whole = RaggedShard((0,), (1, 2)), numbers(12, 5)
    state = {
        str(i): distribute_tensor(whole + i, mesh, placements)
        for i, placements in enumerate(
            [(ragged, Shard(0)), (ragged, Shard(1)), (Replicate(), ragged), (Shard(0), Shard(0))]
        )
    }
    state["sub"] = distribute_tensor(whole + 4, mesh["tp"], [ragged])
    full = full_state_dict(state, rank0_only=True)
    target = {name: torch.zeros_like(x) for name, x in state.items()}
    load_full_state_dict(target, full or None)
    for name, x in target.items():
        assert torch.equal(x.to_local(), state[name].to_local()), name
    for i, value in enumerate(full.values()):
        assert torch.equal(value, whole + i)


def test_full_states_go_out_and_in(run_ranks):
    run_ranks(check_line, 3, exact=True)


def test_full_states_of_two_axes(run_ranks):
    run_ranks(check_square, 4, exact=True)
