# SPDX-License-Identifier: Apache-2.0
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor
from vescale.dtensor.spec import layout_of
from vescale.dtensor.tensor import make_ragged, ragged_spec

SHAPE = (5, 3, 6, 7)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


WHOLES = {
    "deep": numbers(*SHAPE),
    "rows": numbers(12, 6, seed=1),
    "owned": numbers(12, 6, seed=2),
    "shard": numbers(12, 6, seed=3),
    "plain": numbers(12, 6, seed=4),
    "scalar": numbers(seed=5),
    "half": numbers(12, 6, seed=6).bfloat16(),
    "empty": numbers(0, 4, seed=7),
}


def layouts(world_size):
    """Two ways to lay out every tensor: as it is saved, and as it is loaded."""
    last = [0] * (world_size - 1) + [1]
    odd = [1, *[0] * (world_size - 2), 2][-world_size:]
    deep = [17, *[30] * (world_size - 2)] if world_size > 1 else []
    deep.append(630 - sum(deep))
    even = [RaggedShard((0,), [1] * world_size)]
    saved = {
        "deep": [RaggedShard((0, 1, 2, 3), deep)],
        "rows": [RaggedShard((0,), odd)],
        "owned": [RaggedShard((), last)],
        "shard": [Shard(1)],
        "plain": None,
        "scalar": [RaggedShard((), last)],
        "half": [RaggedShard((0, 1), [5, *[0] * (world_size - 2), 67][-world_size:])],
        "empty": even,
    }
    loaded = {
        "deep": [RaggedShard((0, 1), [4, *[0] * (world_size - 2), 11][-world_size:])],
        "rows": [Shard(1)],
        "owned": [RaggedShard((0,), odd)],
        "shard": even,
        "plain": [RaggedShard((0,), odd[::-1])],
        "scalar": None,
        "half": even,
        "empty": [RaggedShard((), last)],
    }
    return saved, loaded


def state(mesh, placements, fill):
    return {
        name: fill(whole.clone())
        if placements[name] is None
        else distribute_tensor(fill(whole.clone()), mesh, placements[name], src_data_rank=None)
        for name, whole in WHOLES.items()
    }


def check_equal(found):
    for name, whole in WHOLES.items():
        value = found[name]
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, whole), (
            name
        )


def stock(mesh, fill):
    """The same tensors as torch's own DTensors, and as parameters of its FSDP2."""
    found = {
        name: torch_distribute_tensor(fill(whole.clone()), mesh, [Shard(0)], src_data_rank=None)
        for name, whole in WHOLES.items()
        if whole.ndim
    }
    module = torch.nn.Linear(6, 12, bias=False, device=DEVICE)
    module.weight.data.copy_(fill(WHOLES["rows"].clone()))
    return {**found, "rows": torch_fully_shard(module, mesh=mesh).weight}


def both(mesh, placements, fill):
    """Our tensors and torch's under the same names, in one checkpoint."""
    return {"ours": state(mesh, placements, fill), "stock": stock(mesh, fill)}


def check_save(rank, world_size, path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = init_device_mesh(DEVICE, (world_size,))
        saved = both(mesh, layouts(world_size)[0], lambda t: t)
        dcp.save(saved, checkpoint_id=path / str(world_size))


def check_load(rank, world_size, path):
    """Every checkpoint: ours and torch's, into other layouts of ours, and into torch's."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = init_device_mesh(DEVICE, (world_size,))
        saved, loaded = layouts(world_size)
        for savers in range(1, 5):
            placements = saved if savers == world_size else loaded
            ours, stocks = state(mesh, placements, torch.zero_), stock(mesh, torch.zero_)
            others = {name: x for name, x in state(mesh, loaded, torch.zero_).items() if x.ndim}
            dcp.load({"ours": ours, "stock": others}, checkpoint_id=path / str(savers))
            check_equal(ours)
            check_equal({**others, "scalar": WHOLES["scalar"]})
            dcp.load({"ours": stocks}, checkpoint_id=path / str(savers))
            for name, value in stocks.items():
                assert torch.equal(value.full_tensor(), WHOLES[name])


def test_checkpoints_of_1_to_4_ranks_load_on_1_to_4_ranks(run_ranks, tmp_path):
    for savers in range(1, 5):
        run_ranks(check_save, savers, tmp_path, exact=True)
    for loaders in range(1, 5):
        run_ranks(check_load, loaders, tmp_path, exact=True)


def check_two_axes(rank, world_size, path):
    mesh, line = init_device_mesh(DEVICE, (2, 2)), init_device_mesh(DEVICE, (4,))
    whole = WHOLES["rows"]
    placements = {
        "tp": [RaggedShard((0, 1), (5, 31)), Shard(1)],
        "nested": [RaggedShard((0,), (1, 2)), Shard(0)],
        "hsdp": [Replicate(), RaggedShard((0,), (1, 2))],
    }
    saved = {name: distribute_tensor(whole, mesh, p) for name, p in placements.items()}
    dcp.save(saved, checkpoint_id=path)
    for target in ([RaggedShard((0,), (0, 1, 3, 2))], [Shard(1)]):
        found = {name: distribute_tensor(whole * 0, line, target) for name in saved}
        dcp.load(found, checkpoint_id=path)
        for value in found.values():
            assert torch.equal(value.full_tensor(), whole)
    found = {name: torch.zeros_like(value) for name, value in saved.items()}
    dcp.load(found, checkpoint_id=path)
    for value in found.values():
        assert torch.equal(value.full_tensor(), whole)
    check_training_state(line, path / "training")


def check_asynchronous(rank, world_size, path):
    """What is saved is what was there at the call, from views of a buffer as from whole tensors."""
    mesh, buffer = init_device_mesh(DEVICE, (world_size,)), torch.zeros(200, device=DEVICE)
    state, place, wholes = {}, 10, {}
    for name, placement in {
        "rows": RaggedShard((0,), (1, 2)),
        "owned": RaggedShard((), (0, 1)),
        "half": RaggedShard((0, 1), (5, 67)),
    }.items():
        whole = wholes[name] = WHOLES[name].float()
        spec = ragged_spec(mesh, [placement], whole.shape, whole.dtype)
        numel = layout_of(spec).numel
        state[name] = torch.nn.Parameter(make_ragged(buffer[place : place + numel], spec))
        place += numel
        state[name].detach().copy_(distribute_tensor(whole, mesh, [placement]))
        assert state[name].data_ptr() == 0
    for name, placement in {"ragged": RaggedShard((0,), (2, 1)), "replica": Replicate()}.items():
        state[name] = state["rows"].detach().redistribute(placements=[placement], async_op=True)
        wholes[name] = wholes["rows"]
    view = buffer[:6].view(2, 3)
    state["shard"] = DTensor.from_local(view, mesh, [Shard(0)])
    for step in range(2):
        saved = dcp.async_save(state, checkpoint_id=path / str(step))
        for name in ("rows", "owned", "half"):
            state[name].detach().add_(1)
        saved.result()
        found = {name: torch.zeros_like(x) for name, x in state.items()}
        dcp.load(found, checkpoint_id=path / str(step))
        for name, whole in wholes.items():
            added = step if name in ("rows", "owned", "half") else 0
            assert torch.equal(found[name].full_tensor(), whole + added), name


def test_asynchronous_saves_copy_views_of_a_buffer(run_ranks, tmp_path):
    run_ranks(check_asynchronous, 2, tmp_path, exact=True)


def check_training_state(mesh, path):
    """The state of a module and its optimizer, by torch's own helpers."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def make():
        module = torch.nn.Linear(6, 12, device=DEVICE)
        for name, param in [*module.named_parameters()]:
            x = distribute_tensor(param.detach(), mesh, [RaggedShard((0,), (1, 0, 2, 1))])
            module.register_parameter(name, torch.nn.Parameter(x))
        optimizer = torch.optim.AdamW(module.parameters())
        for param in module.parameters():
            param.grad = param.detach() * 2
        optimizer.step()
        return module, optimizer

    module, optimizer = make()
    dcp.save(dict(zip("mo", get_state_dict(module, optimizer), strict=True)), checkpoint_id=path)
    other, other_optimizer = make()
    state = dict(zip("mo", get_state_dict(other, other_optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(other, other_optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())
        a, b = optimizer.state[p], other_optimizer.state[q]
        assert torch.equal(a["exp_avg_sq"].full_tensor(), b["exp_avg_sq"].full_tensor())
        assert a["step"] == b["step"]


def test_other_axes_and_optimizers_are_saved_too(run_ranks, tmp_path):
    run_ranks(check_two_axes, 4, tmp_path / "two", exact=True)


def test_each_rank_writes_its_boxes(fake_group):
    fake_group(4, rank=1)
    mesh = init_device_mesh(DEVICE, (4,))
    x = distribute_tensor(
        WHOLES["rows"], mesh, [RaggedShard((0, 1), (8, 10, 54, 0))], src_data_rank=None
    )
    items = x.__create_write_items__("w", x)
    boxes = [(tuple(i.tensor_data.chunk.offsets), tuple(i.tensor_data.chunk.sizes)) for i in items]
    assert boxes == [((1, 2), (1, 4)), ((2, 0), (1, 6))]
    assert {i.tensor_data.size for i in items} == {torch.Size((12, 6))}
    assert [tuple(chunk.offsets) for chunk in x.__create_chunk_list__()] == [(1, 2), (2, 0)]
    for item, expected in zip(items, (WHOLES["rows"][1:2, 2:], WHOLES["rows"][2:3]), strict=True):
        shard = x.__get_tensor_shard__(item.index)
        assert torch.equal(shard, expected)
        assert shard.untyped_storage().data_ptr() == x.to_local().untyped_storage().data_ptr()
    with pytest.raises(ValueError, match=r"no box at offset \(0, 0\)"):
        x.__get_tensor_shard__(MetadataIndex("w", (0, 0)))
    square = init_device_mesh(DEVICE, (2, 2))
    pending = DTensor.from_local(
        torch.ones(18, device=DEVICE), square, [RaggedShard((0,), (3, 1)), Partial()], shape=(4, 6)
    )
    with pytest.raises(ValueError, match="before checkpointing"):
        pending.__create_write_items__("w", pending)


def test_an_empty_rank_writes_nothing(fake_group):
    fake_group(2, rank=0)
    mesh = init_device_mesh(DEVICE, (2,))
    x = distribute_tensor(WHOLES["rows"], mesh, [RaggedShard((), (0, 1))], src_data_rank=None)
    assert x.__create_write_items__("w", x) == []
    assert x.__create_chunk_list__() == []
