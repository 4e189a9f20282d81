# SPDX-License-Identifier: Apache-2.0
"""Run one function on N local ranks, and name the rank that failed first.

Ranks are forked from one server process that has torch loaded, meet on a file rather than a
port, and are stopped when they take too long. ``VESCALE_TEST_DEVICE=cuda`` runs the same checks
on NCCL, one rank per GPU; ``VESCALE_TEST_RANKS=1`` tries on a CPU what one GPU would run.
"""

import faulthandler
import os

# Before torch is loaded, here and in the fork server: ranks share a machine's few cores, and one
# thread each also fixes the order of summation.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import multiprocessing.connection
import signal
import sys
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

# Import these once, in the fork server, so that a rank starts by forking, not importing.
# A name that cannot be imported there is left to the rank.
multiprocessing.set_forkserver_preload(
    ["pytest", "torch.testing", "torch.distributed.checkpoint", "vescale.fsdp.optim"]
)

# One place decides what every check runs on.
DEVICE = os.environ.get("VESCALE_TEST_DEVICE", "cpu")
BACKEND = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[DEVICE]
COLLECTIVE_TIMEOUT = timedelta(seconds=60)  # a missing collective fails instead of hanging
GRACE = 1.0  # seconds for the peers of a failed rank to fail by themselves


def device_problem() -> str | None:
    """Say why tests cannot run on the device that was asked for, or return None."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        return (
            "VESCALE_TEST_DEVICE=cuda, but torch "
            f"{torch.__version__} sees no CUDA device: install a CUDA build, or check the driver."
        )
    return None


def most_ranks() -> int | None:
    """Return how many ranks can run: one per GPU with NCCL, any number (None) with gloo."""
    asked = int(os.environ.get("VESCALE_TEST_RANKS", "0"))
    return asked or (torch.cuda.device_count() if DEVICE == "cuda" else None)


def _enter(rank, world_size, scratch, limit, check, args):
    signal.alarm(int(limit) + 30)  # should pytest itself be killed, ranks do not stay behind
    stacks = (scratch / f"rank{rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        device = None
        if DEVICE == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        store = dist.FileStore(f"{scratch}/store", world_size)
        dist.init_process_group(
            BACKEND, None, COLLECTIVE_TIMEOUT, world_size, rank, store, device_id=device
        )
        check(rank, world_size, *args)
    except BaseException:
        # Before the group closes: its peers fail too, and must not look like the cause.
        (scratch / f"rank{rank}.err").write_text(traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # closing the group would wait for peers that wait for this rank
    dist.destroy_process_group()


def _wait(ranks, until):
    """Wait until all ranks ended, one failed, or the clock shows ``until``."""
    while not any(rank.exitcode for rank in ranks):
        alive = [rank.sentinel for rank in ranks if rank.exitcode is None]
        left = until - time.monotonic()
        if not alive or left <= 0 or not multiprocessing.connection.wait(alive, left):
            return


def _stop(ranks):
    for rank in ranks:
        if rank.exitcode is None:
            rank.kill()
    for rank in ranks:
        rank.join()


def _stacks(ranks, scratch):
    """Ask ranks that still run where they stand, and return their answers."""
    for rank in ranks:
        os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(GRACE)
    return [f"{r.name} stands at:\n{(scratch / f'{r.name}.stacks').read_text()}" for r in ranks]


def _ending(exitcode):
    if exitcode >= 0:
        return f"exited with code {exitcode} before or outside its check; see its output below"
    return f"was killed by {signal.Signals(-exitcode).name}"


def _run(check, world_size, args, limit, scratch):
    context = multiprocessing.get_context("forkserver")
    ranks = []
    try:
        for rank in range(world_size):
            job = (rank, world_size, scratch, limit, check, args)
            ranks.append(context.Process(target=_enter, args=job, name=f"rank{rank}"))
            ranks[-1].start()
        _wait(ranks, time.monotonic() + limit)
        failed = any(rank.exitcode for rank in ranks)
        if failed:
            until = time.monotonic() + GRACE
            for rank in ranks:
                rank.join(max(0, until - time.monotonic()))
        running = [rank for rank in ranks if rank.exitcode is None]
        lost = [
            f"{rank.name} {_ending(rank.exitcode)}"
            for rank in ranks
            if rank.exitcode and not (scratch / f"{rank.name}.err").exists()
        ]
        late = _stacks(running, scratch) if running and not failed else []
    finally:
        _stop(ranks)
    errors = sorted(scratch.glob("rank*.err"), key=lambda path: path.stat().st_mtime_ns)
    if lost:  # has left no error of its own, so its peers only noticed
        return "\n".join([*lost, *(f"then {path.stem}:\n{path.read_text()}" for path in errors)])
    if errors:
        return f"{errors[0].stem} failed first:\n{errors[0].read_text()}"
    if late:
        names = ", ".join(rank.name for rank in running)
        return "\n".join([f"{names} of {world_size} still ran after {limit} s", *late])
    return None


@pytest.fixture
def run_ranks(tmp_path_factory):
    """Return ``run(check, world_size, *args, exact=False, limit=120)``.

    It calls ``check(rank, world_size, *args)`` on each rank, within ``limit`` seconds. Where
    there are fewer GPUs than ranks, as many ranks as GPUs run, or with ``exact=True`` none: a
    check that needs a certain number is skipped. ``check`` must be defined at module level.
    """

    def run(check, world_size, *args, exact=False, limit=120):
        most = most_ranks() or world_size
        if exact and most < world_size:
            pytest.skip(f"needs exactly {world_size} ranks; {most} can run here, one per GPU")
        scratch = tmp_path_factory.mktemp("ranks")  # fresh, so a test may call run twice
        if problem := _run(check, min(world_size, most), args, limit, scratch):
            pytest.fail(problem, pytrace=False)

    return run
