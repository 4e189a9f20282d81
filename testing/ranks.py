# SPDX-License-Identifier: Apache-2.0
"""Run one function on N local ranks. Goes to testing/ranks.py; see style.md, section 4."""

import multiprocessing
import os
import traceback
from datetime import timedelta

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

# Import torch once, in the fork server, so that a rank starts by forking, not importing.
multiprocessing.set_forkserver_preload(["torch.distributed"])


# One place decides: VESCALE_TEST_DEVICE=cuda runs the same checks on NCCL, one rank per GPU.
DEVICE = os.environ.get("VESCALE_TEST_DEVICE", "cpu")
BACKEND = {"cpu": "gloo", "cuda": "nccl"}[DEVICE]


def _enter(rank, check, world_size, scratch, args):
    # A file, not a port: two runs on one host cannot collide. The timeout turns a
    # missing collective into a failure instead of a hung job.
    store, timeout = dist.FileStore(f"{scratch}/store", world_size), timedelta(seconds=30)
    dist.init_process_group(BACKEND, None, timeout, world_size, rank, store)
    try:
        check(rank, world_size, *args)
    except BaseException:
        # Before the group closes: its peers fail too, and must not look like the cause.
        (scratch / f"rank{rank}.err").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


@pytest.fixture
def run_ranks(tmp_path_factory):
    """Call ``check(rank, world_size, *args)`` on each rank; report the first rank to fail."""

    def run(check, world_size, *args):
        scratch = tmp_path_factory.mktemp("ranks")  # fresh, so a test may call run twice
        job = (check, world_size, scratch, args)
        try:
            mp.start_processes(_enter, job, nprocs=world_size, start_method="forkserver")
        except (mp.ProcessRaisedException, mp.ProcessExitedException):
            causes = sorted(scratch.glob("rank*.err"), key=lambda path: path.stat().st_mtime_ns)
            if not causes:
                raise
            pytest.fail(f"{causes[0].stem} failed first:\n{causes[0].read_text()}", pytrace=False)

    return run
