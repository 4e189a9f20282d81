# SPDX-License-Identifier: Apache-2.0
"""``diff`` finds what a comparison of whole tensors finds, however they are cut."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from testing.memory import PeakBytes
from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import Elements, Rows, Whole, fully_shard, inspect, iter_full_parameters
from vescale.fsdp.checkpoint import CheckpointManager
from vescale.fsdp.inspect import measuring
from vescale.fsdp.state_dict import get_model_state_dict

CHANGED = {"layers.1.up.weight": (7, 3), "head.weight": (28, 12), "norm.bias": (5,), "scale": ()}


def wrap(model, shard=fully_shard, **options):
    for layer in model.layers:
        shard(layer, **options)
    return shard(model, **options)


def whole(changed=()):
    """Return one model on every rank, without values that differ by chance."""
    model = build().to(DEVICE)
    model.register_buffer("table", torch.arange(6.0, device=DEVICE))
    with torch.no_grad():
        for name in changed:
            model.get_parameter(name)[CHANGED[name]] += 2.0
    return model


def check_found(found, changed=CHANGED):
    """Only what was changed differs, in one element, where it was changed."""
    entries = {entry.name: entry for entry in found.entries}
    assert entries.keys() == {*dict(whole().named_parameters()), "table"}
    for name, entry in entries.items():
        index = changed.get(name)
        expected = ("equal", 0, None) if index is None else ("differs", 1, index)
        assert (entry.status, entry.count, entry.first) == expected, str(found)
        assert entry.max_abs == (0 if index is None else pytest.approx(2.0, rel=1e-5))
        if index is not None:
            a = whole().get_parameter(name)
            b = whole([name]).get_parameter(name)
            scale = max(float(a.detach().abs().max()), float(b.detach().abs().max()))
            assert entry.max_rel == pytest.approx(entry.max_abs / scale)
    assert found.equal == (not changed)
    relative = [entry.max_rel for entry in found.entries]
    assert relative == sorted(relative, reverse=True)


def kinds(mesh, world_size):
    """Return functions that make the side of a comparison from a whole model."""
    grid = init_device_mesh(DEVICE, (world_size, 1), mesh_dim_names=("replicate", "shard"))

    def replicated(model):
        state = get_model_state_dict(model)
        return {n: distribute_tensor(x, mesh, [Replicate()]) for n, x in state.items()}

    def partial(model):  # a sum, of which the first rank has all
        share = float(mesh.get_rank() == 0)
        return {
            name: DTensor.from_local(x * share, mesh, [Partial()])
            for name, x in get_model_state_dict(model).items()
        }

    return {
        "rows": lambda model: wrap(model, mesh=mesh, granularity=Rows(1)),
        "elements": lambda model: wrap(model, mesh=mesh, granularity=Elements()),
        "whole": lambda model: wrap(model, mesh=mesh, granularity=Whole()),
        "copies": lambda model: wrap(model, mesh=grid),
        "stock": lambda model: wrap(
            model, fsdp2_fully_shard, mesh=mesh, ignored_params={model.scale}
        ),
        "plain": get_model_state_dict,
        "replicated": replicated,
        "partial": partial,
        "columns": lambda model: {
            name: distribute_tensor(x, mesh, [Shard(x.ndim - 1)]) if x.ndim else x
            for name, x in get_model_state_dict(model).items()
        },
    }


def check_pairs(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    makers = kinds(mesh, world_size)
    rows = makers["rows"](whole())
    for name, make in makers.items():
        check_found(inspect.diff(rows, make(whole(CHANGED))))
        check_found(inspect.diff(make(whole(CHANGED)), rows))
        check_found(inspect.diff(make(whole()), rows), {})
        if name not in ("rows", "partial"):
            check_found(inspect.diff(make(whole()), make(whole(CHANGED))))
    rows.unshard()  # while parameters are gathered
    check_found(inspect.diff(rows, makers["elements"](whole(CHANGED))))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_models_and_states_of_any_placement_are_compared(run_ranks, world_size):
    run_ranks(check_pairs, world_size)


def check_folders(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))
    makers = kinds(mesh, world_size)
    model = makers["rows"](whole())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    loss_of(model, batch(0, rank, DEVICE)).backward()
    optimizer.step()
    saved = CheckpointManager(path / "run").save(1, model, optimizer)
    dcp.save(get_model_state_dict(makers["elements"](whole(CHANGED))), checkpoint_id=path / "flat")
    dist.barrier()
    for make in (makers["elements"], makers["plain"], makers["stock"]):
        check_found(inspect.diff(make(whole(CHANGED)), saved))
        check_found(inspect.diff(path / "flat", make(whole())))
        check_found(inspect.diff(str(path / "flat"), make(whole(CHANGED))), {})
    found = inspect.diff(saved, path / "flat")  # whole checkpoints, names as they are
    assert {entry.status for entry in found.entries} == {"only in a", "only in b"}
    assert inspect.diff(saved, saved).equal
    check_found(inspect.diff({"model": get_model_state_dict(whole(CHANGED))}["model"], saved))
    nested = inspect.diff({"model": get_model_state_dict(whole())}, saved)
    states = [e.name for e in nested.entries if e.status == "only in b"]
    assert states
    assert all(name.startswith(("optimizer.", "ranks.")) for name in states)
    with pytest.raises(ValueError, match=r"it has 'step-000000001', so pass that"):
        inspect.diff(get_model_state_dict(whole()), path / "run")
    with pytest.raises(ValueError, match=r"a is '.*', which is no checkpoint.*no \.metadata"):
        inspect.diff(path / "nothing", model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_checkpoints_are_compared_with_models_and_each_other(run_ranks, world_size, tmp_path):
    run_ranks(check_folders, world_size, tmp_path)


def check_replicas(rank, world_size):
    """A replica that went its own way is found, and not hidden by the one that did not."""
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard"))
    model = wrap(whole(), mesh=mesh)
    before = copy.deepcopy(get_model_state_dict(model))
    if rank == 1:
        with torch.no_grad():
            model.head.weight.to_local().view(-1)[17] += 1.0
            model.table[3] = float("nan")
    found = {entry.name: entry for entry in inspect.diff(before, model).entries}
    assert (found["head.weight"].count, found["head.weight"].first) == (1, (1, 4))
    assert (found["table"].count, found["table"].nans, found["table"].first) == (1, (0, 1), (3,))
    assert sum(entry.count for entry in found.values()) == 2


def check_one_rank_cannot(rank, world_size, path):
    """What one rank cannot do, all ranks hear of."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    model = wrap(whole(), mesh=mesh)
    dcp.save(get_model_state_dict(model), checkpoint_id=path / "saved")
    expected = ValueError if rank else RuntimeError
    with pytest.raises(expected, match="which is no checkpoint"):
        inspect.diff(model, path / ("other" if rank else "saved"))
    with pytest.raises(RuntimeError, match="do not compare their tensors alike"):
        inspect.diff(model, get_model_state_dict(whole()) if rank else {})
    assert inspect.diff(model, path / "saved").equal


def check_memory(rank, world_size):
    """Shards placed alike are compared where they are; for others one shard at a time is made."""
    measuring.CHUNK_NUMEL = 1024
    mesh = init_device_mesh(DEVICE, (world_size,))
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).to(DEVICE)
    first, alike, other = (
        fully_shard(copy.deepcopy(layers), mesh=mesh, granularity=granularity)
        for granularity in (Rows(1), Rows(1), Rows(384))
    )
    nbytes = layers[0].weight.nbytes
    for model, most in ((alike, nbytes // 8), (other, 3 * nbytes)):
        with PeakBytes() as memory:
            assert inspect.diff(first, model).equal
        assert memory.peak <= most, (memory.peak, nbytes)


@pytest.mark.parametrize("check", [check_replicas, check_memory])
def test_replicas_and_memory(run_ranks, check):
    run_ranks(check, 2)


def test_all_ranks_hear_what_one_cannot(run_ranks, tmp_path):
    run_ranks(check_one_rank_cannot, 2, tmp_path)


def one(a, b):
    return inspect.diff({"x": torch.as_tensor(a)}, {"x": torch.as_tensor(b)}).entries[0]


def test_special_numbers():
    nan, inf = float("nan"), float("inf")
    same = one([nan, inf, -inf, 1.0], [nan, inf, -inf, 1.0])
    assert (same.status, same.count, same.nans, same.max_abs) == ("equal", 0, (1, 1), 0.0)
    assert "1 and 1" in str(inspect.diff({"x": torch.tensor([nan])}, {"x": torch.tensor([nan])}))
    lone = one([nan, 4.0], [1.0, 3.0])
    assert (lone.count, lone.nans, lone.max_abs, lone.max_rel) == (2, (1, 0), 1.0, 0.25)
    assert (one([inf], [1.0]).max_abs, one([inf], [1.0]).max_rel) == (inf, inf)
    assert one([inf], [-inf]).count == 1
    large = one([2**62, 0], [2**62 + 1, 0])  # alike as float64
    assert (large.count, large.first) == (1, (0,))
    assert one([True, False], [True, True]).first == (1,)
    assert one([1 + 1j], [1 - 1j]).max_abs == 2.0
    assert one([0.0], [-0.0]).status == "equal"
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float64):
        found = one(torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([1.0, 4.0]).to(dtype))
        assert (found.count, found.max_abs, found.max_rel, found.first) == (1, 2.0, 0.5, (1,))
    assert one(torch.zeros(0, 3), torch.zeros(0, 3)).status == "equal"


def test_other_shapes_dtypes_and_names_come_first():
    a = {"p": torch.zeros(2), "q": torch.zeros(2), "r": torch.zeros(2), "only": torch.zeros(1)}
    b = {"p": torch.ones(2), "q": torch.zeros(3), "r": torch.zeros(2).bfloat16(), "step": 1}
    b["state"] = {"mine": [torch.zeros(4)]}
    found = inspect.diff(a, b)
    statuses = [(entry.name, entry.status) for entry in found.entries]
    assert statuses == [
        *(("only", "only in a"), ("state.mine.0", "only in b"), ("q", "shape"), ("r", "dtype")),
        ("p", "differs"),
    ]
    assert not found.equal
    text = str(found).splitlines()
    assert text[0] == (
        "5 tensors: 1 only in a, 1 only in b, 1 of another shape, 1 of another dtype, 1 differ"
    )
    assert text[3].split() == ["state.mine.0", "only", "in", "b:", "[4]", "float32"]
    assert "[2] float32 and [2] bfloat16" in text[5]
    assert text[6].split() == ["p", "differs", "2", "of", "2", "1", "1", "[0]"]
    many = inspect.diff({str(n): torch.zeros(1) for n in range(50)}, {})
    assert str(many).endswith("and 10 more")
    assert str(inspect.diff({}, {})) == "No tensors to compare."


def test_a_nan_on_one_side_comes_before_larger_differences():
    a = {"far": torch.tensor([1.0]), "lost": torch.tensor([float("nan"), 1.0])}
    b = {"far": torch.tensor([9.0]), "lost": torch.tensor([1.0, 1.0])}
    assert [entry.name for entry in inspect.diff(a, b).entries] == ["lost", "far"]


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(TypeError, match=r"b is a list, expected an nn\.Module, a state dict, or"):
        inspect.diff({}, [])
    with pytest.raises(ValueError, match="weight of a is on the meta device and has no values"):
        inspect.diff(nn.Linear(2, 2, device="meta"), {})


def check_dtypes_of_shards(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    narrow = wrap(whole().bfloat16(), mesh=mesh, granularity=Rows(4))
    found = inspect.diff(wrap(whole(), mesh=mesh), narrow)
    up = next(entry for entry in found.entries if entry.name == "layers.0.up.weight")
    reference = dict(whole().named_parameters())["layers.0.up.weight"].detach()
    gap = (reference.double() - reference.bfloat16().double()).abs()
    assert (up.status, up.count) == ("dtype", int((gap > 0).sum()))
    assert up.max_abs == float(gap.max())
    assert len([*iter_full_parameters(narrow)]) == len(found.entries) - 1


def test_shards_of_another_dtype_are_compared_by_value(run_ranks):
    run_ranks(check_dtypes_of_shards, 2)
