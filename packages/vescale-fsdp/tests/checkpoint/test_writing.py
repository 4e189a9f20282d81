# SPDX-License-Identifier: Apache-2.0
import logging
import os
import threading
import time

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh

from testing.ranks import DEVICE
from vescale.fsdp import fully_shard
from vescale.fsdp.checkpoint import CheckpointManager
from vescale.fsdp.checkpoint import folder as on_disk


def make(world_size):
    return fully_shard(nn.Linear(6, 5).to(DEVICE), mesh=init_device_mesh(DEVICE, (world_size,)))


def check_lost_files(rank, world_size, path):
    """What a rank wrote elsewhere, or cut short, is not published, even without checksums."""
    model = make(world_size)
    manager = CheckpointManager(path, checksums=False)
    save, lost = dcp.save, True

    def lossy(state, *, checkpoint_id, process_group):
        save(state, checkpoint_id=checkpoint_id, process_group=process_group)
        if rank == 1 and lost:
            (checkpoint_id / "__1_0.distcp").unlink()
        elif rank == 1:
            os.truncate(checkpoint_id / "__1_0.distcp", 100)
        dist.barrier(process_group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "save", lossy)
        for lost in (True, False):  # noqa: B007, lossy reads it
            with pytest.raises(RuntimeError, match=r"lacks what ranks wrote to \['__1_0.distcp'\]"):
                manager.save(1, model)
    assert manager.newest() is None
    assert manager.save(1, model) == manager.newest().path


def check_two_managers(rank, world_size, path):
    """A manager that saves while another one's save goes on behind does not remove its files."""
    model = make(world_size)
    one, other = CheckpointManager(path, asynchronous=True), CheckpointManager(path)
    write = filesystem._write_item

    def slow(*args, **options):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)
        return write(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem, "_write_item", slow)
        for step in (1, 2):  # another step, and the same
            where = one.save(step, model)
            other.save(2, model)
            assert one.wait() == where == other.newest().path
    assert sorted(p.name for p in path.iterdir()) == ["step-000000001", "step-000000002"]


def check_nobody_waits(rank, world_size, path):
    """An error of a save behind training is logged, on the first rank, and raised."""
    model = make(world_size)
    manager = CheckpointManager(path, asynchronous=True)
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append((record.levelname, record.getMessage()))
    logging.getLogger("vescale.fsdp.checkpoint").addHandler(handler)

    def full(partial, manifest):
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_disk, "publish", full)
        manager.save(7, model)
        with pytest.raises((OSError, RuntimeError), match="no space left"):
            manager.wait()
    text = "the checkpoint of step 7 was not written: OSError: no space left (wait() waits"
    assert [(level, line[: len(text)]) for level, line in told] == [("ERROR", text)][rank:]
    assert manager.wait() is None
    manager.save(8, model)
    assert manager.wait() == manager.newest().path


def check_all(rank, world_size, path):
    check_lost_files(rank, world_size, path / "lost")
    check_two_managers(rank, world_size, path / "two")
    check_nobody_waits(rank, world_size, path / "alone")


def test_only_what_all_ranks_wrote_is_published(run_ranks, tmp_path):
    run_ranks(check_all, 2, tmp_path, exact=True)
