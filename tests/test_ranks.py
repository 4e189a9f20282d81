# SPDX-License-Identifier: Apache-2.0
"""The rank runner and the shared conftest are tested too: all other tests lean on them."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from testing.ranks import DEVICE

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Factor:
    """An argument whose class lives in a test module, so each rank has to import it."""

    value: int


def check_sum(rank, world_size, factor):
    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    total = torch.full((3,), float(rank * factor.value), device=DEVICE)
    dist.all_reduce(total)
    expected = factor.value * world_size * (world_size - 1) / 2
    assert total.tolist() == [expected] * 3


def check_last_rank_fails(rank, world_size):
    if rank == world_size - 1:
        raise ValueError("rank at fault")
    dist.barrier()


def check_first_rank_is_killed(rank, world_size):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def check_last_rank_hangs(rank, world_size):
    if rank == world_size - 1:
        wait_for_nothing()


def wait_for_nothing():
    while True:
        time.sleep(0.1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_form_a_group(run_ranks, world_size):
    run_ranks(check_sum, world_size, Factor(5))


def test_the_rank_that_failed_first_is_named(run_ranks):
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank2 failed first:.*rank at fault"):
        run_ranks(check_last_rank_fails, 3, exact=True)


def test_a_killed_rank_is_named_before_its_peers(run_ranks):
    with pytest.raises(pytest.fail.Exception, match=r"^rank0 was killed by SIGKILL"):
        run_ranks(check_first_rank_is_killed, 2)


def test_a_hanging_rank_fails_and_shows_where_it_stands(run_ranks):
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"(?s)^rank1 of 2 still .*wait_for_nothing"):
        run_ranks(check_last_rank_hangs, 2, exact=True, limit=5)
    assert time.monotonic() - start < 30


def test_fewer_gpus_mean_fewer_ranks_or_a_skip(run_ranks, monkeypatch):
    monkeypatch.setenv("VESCALE_TEST_RANKS", "1")
    run_ranks(check_sum, 3, Factor(5))  # asserts the world size that it is told
    with pytest.raises(pytest.skip.Exception, match="exactly 2 ranks; 1 can run here"):
        run_ranks(check_sum, 2, Factor(5), exact=True)


SAME_NAME = """
import torch.distributed as dist

def check(rank, world_size):
    assert dist.get_world_size() == 1 and "vescale-{package}" in __file__

def test_ranks_import_this_module(run_ranks):
    run_ranks(check, 1)
"""
ALL_SKIPPED = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu(): ...
"""


def pytest_in(folder, *args, **environ):
    """Run pytest with this checkout's conftest and settings on test files of its own."""
    for name in ("conftest.py", "pyproject.toml", "testing"):
        (folder / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
    environ = os.environ | {"VESCALE_TEST_DEVICE": "cpu"} | environ
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )


def test_two_packages_may_have_test_modules_of_one_name(tmp_path):
    for package in "ab":
        folder = tmp_path / f"packages/vescale-{package}/tests"
        folder.mkdir(parents=True)
        (folder / "test_same.py").write_text(SAME_NAME.format(package=package))
    done = pytest_in(tmp_path, "packages/vescale-a", "packages/vescale-b")
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_suite_that_skips_everything_is_red(tmp_path):
    (tmp_path / "test_skipped.py").write_text(ALL_SKIPPED)
    done = pytest_in(tmp_path, "test_skipped.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "every test was skipped" in done.stdout
    assert "run it with `nox -s tests_gpu`" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_asking_for_a_gpu_without_one_is_no_pass(tmp_path):
    (tmp_path / "test_skipped.py").write_text(ALL_SKIPPED)
    done = pytest_in(tmp_path, "test_skipped.py", VESCALE_TEST_DEVICE="cuda")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "sees no CUDA device" in done.stdout + done.stderr
