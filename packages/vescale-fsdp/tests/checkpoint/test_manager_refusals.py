# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on one rank is an error on all of them, at once, and the next save is whole."""

import os
from collections import Counter
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from testing.ranks import DEVICE
from vescale.fsdp import fully_shard
from vescale.fsdp.checkpoint import CheckpointManager
from vescale.fsdp.checkpoint.manifest import MANIFEST
from vescale.fsdp.state_dict import get_optimizer_state_dict


class Extra(nn.Module):
    """A layer whose own state may fail to be given or taken."""

    def __init__(self):
        super().__init__()
        self.layer, self.fails = nn.Linear(6, 5), ""

    def forward(self, x):
        return self.layer(x)

    def get_extra_state(self):
        if self.fails == "get":
            raise KeyError("no extra state")
        return {}

    def set_extra_state(self, state):
        if self.fails == "set":
            raise KeyError("no place for an extra state")


def make(world_size):
    model = Extra().to(DEVICE)
    fully_shard(model, mesh=init_device_mesh(DEVICE, (world_size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def refuses(rank, world_size, kind, text, call):
    """The last rank has the error; the others are told."""
    last = rank == world_size - 1
    with pytest.raises(kind if last else ValueError, match=text) as caught:
        call()
    assert last or f"rank {world_size - 1} cannot" in str(caught.value)


def check_one_rank_fails(rank, world_size, path):
    manager = CheckpointManager(path, timeout=timedelta(seconds=20))
    model, optimizer = make(world_size)
    last = rank == world_size - 1
    stranger = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    wrong = stranger if last else optimizer
    deep = []
    for _ in range(5000):
        deep = [deep]

    def save(model=model, optimizer=optimizer, **more):
        return manager.save(1, model, optimizer, **more)

    def case(kind, text, call, *args, **options):
        refuses(rank, world_size, kind, text, lambda: call(*args, **options))

    unpickled = (lambda: 1) if last else 1
    case(Exception, "pickle", save, rank_state=unpickled)
    case(TypeError, "recursion", save, progress={"a": deep if last else 1})
    case(ValueError, "none of the model's", save, optimizer=wrong)
    case(TypeError, "model is a NoneType", save, model=None if last else model)
    case(ValueError, "keep_last=0", CheckpointManager, path, keep_last=0 if last else 1)
    model.fails = "get" if last else ""
    case(KeyError, "no extra state", save)
    model.fails = ""
    assert not path.exists()
    assert manager.load(model, optimizer) is None
    where = save()
    case(ValueError, "none of the model's", manager.load, model, wrong)
    case(TypeError, "model is a NoneType", manager.load, None if last else model)
    case(TypeError, "PathLike", manager.load, model, checkpoint=3 if last else where)
    with pytest.raises(ValueError, match="some ranks load from a checkpoint and others None"):
        manager.load(model, checkpoint=where if last else None)
    model.fails = "get" if last else ""
    case(KeyError, "no extra state", manager.load, model)
    model.fails = "set" if last else ""
    case(KeyError, "no place for an extra state", manager.load, model)
    model.fails = ""
    assert manager.load(model, optimizer).checkpoint.path == where


def check_what_cannot_be_saved(rank, world_size, path):
    """Tensors without values, and two states of one name, are refused before a file is made."""
    manager = CheckpointManager(path)
    with torch.device("meta"):
        empty = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="weight, bias are on the meta device and have no values"):
        manager.save(1, empty)
    model, optimizer = make(world_size)
    other = torch.optim.SGD([model.layer.weight], lr=0.1)
    match = r"layer.weight is in two optimizers, AdamW and SGD"
    with pytest.raises(ValueError, match=match):
        manager.save(1, model, [optimizer, other])
    with pytest.raises(ValueError, match=match):
        get_optimizer_state_dict(model, [optimizer, other])
    assert not path.exists()


def check_keys_of_progress(rank, world_size, path):
    """The milestones of torch's MultiStepLR are numbers, as keys."""
    manager = CheckpointManager(path)
    model, optimizer = make(world_size)
    progress = {"milestones": Counter({3: 1, 5: 2}), "1": 0}
    manager.save(1, model, optimizer, progress=progress)
    assert manager.load(model).checkpoint.progress == progress
    other = {**progress, "milestones": {3: 1, 5: rank}}
    with pytest.raises(ValueError, match=r"progress.milestones.5 is 0 on rank 0 and 1 on rank 1"):
        manager.save(2, model, optimizer, progress=other)


def check_chdir(rank, world_size, path):
    """A relative folder stays where it was, also for a save that goes on behind."""
    model, _ = make(world_size)
    here = os.getcwd()
    os.chdir(path)
    try:
        manager = CheckpointManager("relative", asynchronous=True)
        manager.save(1, model)
        os.chdir("/")
        assert manager.wait() == path / "relative" / "step-000000001"
        assert manager.load(model).checkpoint.step == 1
    finally:
        os.chdir(here)


def check_none_usable(rank, world_size, path):
    """A run does not begin anew where all of its checkpoints are broken."""
    manager = CheckpointManager(path, keep_last=1)
    model, _ = make(world_size)
    where = manager.save(1, model)
    text = (where / MANIFEST).read_text()
    torch.distributed.barrier()
    if rank == 0:
        (where / MANIFEST).write_text('{"format": 2}')
        (path / ".partial-step-000000002").mkdir()
    torch.distributed.barrier()
    assert manager.newest() is None
    with pytest.raises(RuntimeError, match="none can be used: step-000000001 has format 2"):
        manager.load(model)
    torch.distributed.barrier()
    if rank == 0:
        (where / MANIFEST).write_text(text)
    torch.distributed.barrier()
    assert manager.load(model).checkpoint.step == 1


def check_all(rank, world_size, path):
    check_one_rank_fails(rank, world_size, path / "fails")
    check_what_cannot_be_saved(rank, world_size, path / "nothing")
    check_keys_of_progress(rank, world_size, path / "keys")
    check_chdir(rank, world_size, path)
    check_none_usable(rank, world_size, path / "broken")


def test_all_ranks_are_told(run_ranks, tmp_path):
    run_ranks(check_all, 2, tmp_path, exact=True)
