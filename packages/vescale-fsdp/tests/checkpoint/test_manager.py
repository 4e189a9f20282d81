# SPDX-License-Identifier: Apache-2.0
"""Saving and going on, on ranks: rows 2, 79, 82 and 88 of the project's cases are here too."""

import logging
import os
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict as torch_get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import Elements, fully_shard
from vescale.fsdp.checkpoint import CheckpointManager
from vescale.fsdp.checkpoint.folder import MANIFEST
from vescale.fsdp.optim import Muon, split_params


class Net(nn.Module):
    """With dropout, so that the next steps depend on the random generators."""

    def __init__(self, model):
        super().__init__()
        self.model, self.drop = model, nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long, device=DEVICE))
        self.register_buffer("table", torch.ones(2, device=DEVICE), persistent=False)

    def forward(self, tokens):
        self.seen += tokens.numel()
        return self.drop(self.model(tokens)) * self.table.sum()

    def get_extra_state(self):
        return {"mode": "a"}

    def set_extra_state(self, state):
        self.mode = state["mode"]


def make(mesh, seed=0, **options):
    model = Net(build(seed, tied=True)).to(DEVICE)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    matrices, rest = split_params(model)
    return model, (Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01))


def train(model, optimizers, steps, rank):
    losses = []
    for number in steps:
        loss = loss_of(model, batch(number, rank, DEVICE))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_continue(rank, world_size, path):
    """With saves going on behind or not, a run continues bit for bit, dropout included."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    for asynchronous in (False, True):
        folder = path / f"{world_size}-{asynchronous}"
        manager = CheckpointManager(folder, asynchronous=asynchronous, keep_last=2)
        model, optimizers = make(mesh)
        assert manager.newest() is None
        assert manager.load(model, optimizers) is None
        torch.manual_seed(100 + rank)
        expected = []
        for step in range(4):
            if step < 3:
                where = manager.save(
                    step, model, optimizers, progress={"windows": 4 * step}, rank_state=[rank, step]
                )
            expected += train(model, optimizers, [step], rank)
        if asynchronous:
            assert manager.wait() == where
        assert manager.wait() is None
        names = sorted(p.name for p in folder.iterdir())
        assert names == ["step-000000001", "step-000000002"]
        other, new = make(mesh, seed=1, granularity=Elements())
        torch.manual_seed(7)
        restored = manager.load(other, new)
        assert restored.checkpoint.path == where
        assert (restored.checkpoint.step, restored.rank_state) == (2, [rank, 2])
        assert restored.checkpoint.progress == {"windows": 8}
        assert (restored.same_random, restored.checkpoint.skipped) == (True, ())
        assert other.mode == "a"
        assert other.seen == model.seen - 2 * 32
        assert train(other, new, [2, 3], rank) == expected[2:]


def check_meta(rank, world_size, path):
    """A model on the meta device gets its memory by loading; what no checkpoint has is named."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    model, optimizers = make(mesh)
    train(model, optimizers, [0], rank)
    manager = CheckpointManager(path / f"meta{world_size}")
    manager.save(1, model, optimizers)
    with torch.device("meta"):
        empty = build(tied=True)
        wrong = nn.BatchNorm1d(3)
        wrong.register_buffer("table", torch.ones(2), persistent=False)
    fully_shard(empty, mesh=mesh)
    plain = CheckpointManager(path / f"plain{world_size}")
    plain.save(1, model.model)
    plain.load(empty)
    assert empty.head.weight is empty.embed.weight
    for name, value in model.model.state_dict().items():
        assert torch.equal(empty.state_dict()[name].full_tensor(), value.full_tensor())
    wrong.weight = wrong.bias = None
    with pytest.raises(ValueError, match=r"no values for \['table', 'running_mean'"):
        plain.load(wrong, strict=False)


def check_other_ranks(rank, world_size, path):
    """Any number of ranks reads what any other wrote; generators start anew and say so."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    for savers in (1, 2, 3):
        manager = CheckpointManager(path / f"{savers}-True")
        model, optimizers = make(mesh, seed=1, granularity=Elements())
        restored = manager.load(model, optimizers)
        assert restored.checkpoint.world_size == savers
        assert restored.same_random == (savers == world_size)
        assert restored.rank_state == ([rank, 2] if rank < savers else None)
        assert optimizers[1].state[model.model.embed.weight]["step"] == 2


def check_all(rank, world_size, path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # DCP warns of duplicates where ranks write what is empty
        check_continue(rank, world_size, path)
    check_meta(rank, world_size, path)


def test_runs_go_on_from_their_checkpoints(run_ranks, tmp_path):
    for world_size in (1, 2, 3):
        run_ranks(check_all, world_size, tmp_path, exact=True)
    for world_size in (1, 2, 3):
        run_ranks(check_other_ranks, world_size, tmp_path, exact=True)


def check_broken(rank, world_size, path):
    """What is broken is named, on all ranks, and the one before is used."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    manager = CheckpointManager(path)
    model, optimizers = make(mesh)
    paths = [manager.save(step, model, optimizers) for step in range(1, 6)]
    dist.barrier()
    if rank == 0:
        os.truncate(paths[4] / "__0_0.distcp", 1000)
        with open(paths[3] / "__0_0.distcp", "r+b") as file:
            file.seek(3000)
            byte = file.read(1)
            file.seek(3000)
            file.write(bytes([byte[0] ^ 1]))
        (paths[2] / MANIFEST).unlink()
        (paths[1] / ".metadata").write_bytes(b"x" * (paths[1] / ".metadata").stat().st_size)
    dist.barrier()
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("vescale.fsdp.checkpoint").addHandler(handler)
    found = manager.newest()
    assert found.path == paths[0]
    reasons = {item.path: item.reason for item in found.skipped}
    assert reasons[paths[4]].startswith("has 1000 bytes of __0_0.distcp")
    assert reasons[paths[3]] == "has __0_0.distcp with other contents than were written"
    assert reasons[paths[2]] == f"has no {MANIFEST}"
    assert reasons[paths[1]].startswith("has .metadata with other contents")
    assert len(told) == (4 if rank == 0 else 0)
    assert manager.load(model, optimizers).checkpoint.step == 1
    with pytest.raises(ValueError, match="has 1000 bytes"):
        manager.load(model, optimizers, checkpoint=paths[4])
    with pytest.raises(ValueError, match="is no checkpoint that rank 0 can read"):
        manager.load(model, optimizers, checkpoint=path / "nothing")


def check_differing_ranks(rank, world_size, path):
    """Nothing is written where ranks would write different things (row 82)."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    manager = CheckpointManager(path)
    model, optimizers = make(mesh)
    last = rank == world_size - 1
    options = {"progress": {"windows": 3}}
    manager.save(0, model, optimizers, **options)

    def refuse(match, step=1, models=model, **changed):
        with pytest.raises((ValueError, TypeError), match=match):
            manager.save(step, models, optimizers, **{**options, **changed})

    refuse("step is 1 on rank 0 and 2 on rank 1", step=2 if last else 1)
    refuse("progress.windows is 3 on rank 0 and 4", progress={"windows": 4 if last else 3})
    refuse("step=-1", step=-1 if last else 1)
    with pytest.raises((ValueError, TypeError), match="optimizers is a NoneType"):
        manager.save(1, model, None if last else optimizers, **options)
    with pytest.raises((ValueError, TypeError), match="optimizers is a NoneType"):
        manager.load(model, None if last else optimizers)
    refuse("progress has something", progress={"a": object()} if last else {})
    refuse("rank_state has something", rank_state=object() if last else 1)
    if last:
        optimizers[1].param_groups[0]["lr"] = 0.5
        optimizers[1].state[model.model.embed.weight]["more"] = torch.ones(1)
    refuse("param_groups.1.lr is 0.01 on rank 0 and 0.5 on rank 1; .*more is on rank 1 and not on")
    if last:
        del optimizers[1].state[model.model.embed.weight]["more"]
        optimizers[1].param_groups[0]["lr"] = 0.01
    assert [p.name for p in path.iterdir()] == ["step-000000000"]
    if last:
        model.register_buffer("seen", model.seen.float())
    refuse("model.seen is torch.int64 .* on rank 0 and torch.float32", models=model)


def check_misfits(rank, world_size, path):
    """Named before anything is changed."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    manager = CheckpointManager(path)
    model, optimizers = make(mesh)
    train(model, optimizers, [0], rank)
    manager.save(1, model, optimizers)
    other, new = make(mesh, seed=3)
    other.register_buffer("more", torch.ones(2, device=DEVICE))
    before = other.model.embed.weight.full_tensor()
    with pytest.raises(ValueError, match=r"it lacks \['model.more'\], and nothing wants its \[\]"):
        manager.load(other, new)
    other.more = torch.ones(2, device=DEVICE) * 3
    small = fully_shard(build(width=11, tied=True).to(DEVICE), mesh=mesh)
    with pytest.raises(ValueError, match=r"model.embed.weight has shape \(29, 13\)"):
        manager.load(nn.ModuleDict({"model": small}), strict=False)
    assert torch.equal(other.model.embed.weight.full_tensor(), before)
    assert manager.load(other, new, strict=False).checkpoint.step == 1
    assert other.more.tolist() == [3.0, 3.0]
    assert torch.equal(
        other.model.embed.weight.full_tensor(), model.model.embed.weight.full_tensor()
    )
    with pytest.raises(ValueError, match="expected a positive integer"):
        CheckpointManager(path, keep_last=0)


def vector_scale(seed):
    """FSDP2 takes no parameters without dims, and none without elements."""
    model = build(seed, tied=True)
    del model.nothing
    model.nothing = torch.zeros(1)
    model.scale = nn.Parameter(torch.ones(1))
    return model.to(DEVICE)


def check_stock(rank, world_size, path):
    """A checkpoint of FSDP2 by torch alone is loaded from its path, and the other way round."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    stock = fsdp2_fully_shard(vector_scale(2), mesh=mesh)
    theirs = torch.optim.AdamW(stock.parameters(), lr=0.03)
    train(stock, [theirs], [0], rank)
    state = dict(zip(("model", "optimizer"), torch_get_state_dict(stock, theirs), strict=True))
    dcp.save(state, checkpoint_id=path / "stock")
    model = fully_shard(vector_scale(0), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = CheckpointManager(path / "ours")
    restored = manager.load(model, optimizer, checkpoint=path / "stock")
    assert (restored.rank_state, restored.same_random) == (None, False)
    assert optimizer.param_groups[0]["lr"] == 0.03
    where = manager.save(1, model, optimizer)
    again = fsdp2_fully_shard(vector_scale(3), mesh=mesh)
    back = torch.optim.AdamW(again.parameters(), lr=0.01)
    state = dict(zip(("model", "optimizer"), torch_get_state_dict(again, back), strict=True))
    dcp.load(state, checkpoint_id=where)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.03
    for name, value in stock.state_dict().items():
        assert torch.equal(again.state_dict()[name].full_tensor(), value.full_tensor()), name
        assert torch.equal(model.state_dict()[name].full_tensor(), value.full_tensor()), name
        if name in state["optimizer"]["state"]:
            one = state["optimizer"]["state"][name]["exp_avg"].full_tensor()
            two = theirs.state[stock.get_parameter(name)]["exp_avg"].full_tensor()
            assert torch.equal(one, two)


def check_mistakes(rank, world_size, path):
    check_broken(rank, world_size, path / "broken")
    check_differing_ranks(rank, world_size, path / "differing")
    check_misfits(rank, world_size, path / "misfits")
    check_stock(rank, world_size, path)


def test_what_is_broken_or_does_not_fit_is_named(run_ranks, tmp_path):
    run_ranks(check_mistakes, 2, tmp_path, exact=True)


def test_a_process_group_is_needed():
    with pytest.raises(RuntimeError, match="HashStore"):
        CheckpointManager("somewhere")


def test_the_process_group_ends_with_the_others(tmp_path):
    """Its threads must not outlive Python: they would abort the process at its end."""
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            manager = CheckpointManager(tmp_path)
            assert manager.newest() is None
            group = weakref.ref(manager._group)
        finally:
            dist.destroy_process_group()
        assert group() is None
        with pytest.raises(RuntimeError, match="make another manager after"):
            manager.newest()
