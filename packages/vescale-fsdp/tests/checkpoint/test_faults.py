# SPDX-License-Identifier: Apache-2.0
"""Ranks die by SIGKILL at random moments; torchrun or the next run goes on from what was complete.

A round kills a rank during forward, backward with its reductions, save or publish, perhaps once
more after the restart; every third one starts anew with fewer ranks instead. It passes if no
attempt began before a checkpoint that had been complete, and if the last one ended with the state
of a run that nothing happened to: the same bits on as many ranks, up to rounding on fewer.
``VESCALE_FAULTS`` is the number of rounds, 3 without it.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from testing.fault_worker import Kill, Plan
from testing.ranks import DEVICE
from vescale.fsdp.checkpoint.folder import find

ROOT = Path(__file__).parents[4]
ROUNDS = int(os.environ.get("VESCALE_FAULTS", "3"))
STEPS, RANKS = 5, 2
RESTARTS = 8  # more than kills: on a busy machine ranks may also fail to meet
PHASES = ("publish", "save", "reduce", "forward")
DELAYS = {"forward": 0.02, "reduce": 0.03, "save": 0.15}  # at most, in seconds


def torchrun(folder, plan, nproc, max_restarts):
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", str(nproc)),
        *("--max-restarts", str(max_restarts), "--monitor-interval", "0.1"),
        *("-m", "testing.fault_worker", str(folder), plan.text()),
    )
    # Else ranks that start again may meet at an address of the attempt before, and wait for ever.
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder / "stderr", "a") as words:
        run = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=words, stderr=words, start_new_session=True
        )
    try:
        run.wait(timeout=1800)  # starts take minutes on a machine with many others
    finally:
        if run.poll() is None:
            run.terminate()  # torchrun then ends its ranks
            run.wait()
    return run.returncode, (folder / "stderr").read_text()[-3000:]


def kill_job(folder, plan, nproc):
    """Run without restarts until a rank was killed, not once more: ranks may also fail to meet."""
    for _ in range(RESTARTS):
        code, words = torchrun(folder, plan, nproc, 0)
        assert code != 0, f"{plan} killed nothing"
        if (folder / "log").exists() and read_log(folder)[1]:
            return
    pytest.fail(f"the ranks did not meet in {RESTARTS} starts: {words}")


def plan_of(seed):
    """Return the plan of a round, and on how many ranks it begins and ends."""
    draw = random.Random(seed)
    fewer = seed % 3 == 2
    begin = draw.choice((2, 3)) if fewer else RANKS
    phase = PHASES[seed % len(PHASES)] if seed < len(PHASES) else draw.choice(PHASES)
    kills = [kill_of(draw, 0, phase, begin, draw.randint(1, STEPS))]
    if not fewer and draw.random() < 0.3:
        kills.append(kill_of(draw, 1, draw.choice(PHASES), begin, STEPS))
    plan = Plan(STEPS, asynchronous=draw.random() < 0.5, kills=tuple(kills))
    return plan, begin, draw.randint(1, begin - 1) if fewer else begin


def kill_of(draw, attempt, phase, ranks, step):
    if phase == "publish":  # the first rank does
        return Kill(attempt, 0, phase, step, draw.randint(0, 4))
    return Kill(attempt, draw.randrange(ranks), phase, step, draw.uniform(0, DELAYS[phase]))


def read_log(folder):
    """Return from which step each attempt began and what was complete before it; the kills."""
    begun, complete, kills = [], 0, 0
    for line in (folder / "log").read_text().splitlines():
        word, *number = line.split()
        if word == "from":
            begun.append((int(number[0]), complete))
        elif word == "complete":
            complete = max(complete, int(number[0]))
        kills += word == "kill"
    return begun, kills


def flat(state, prefix=""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value


def same(folder, reference, exact):
    for found, expected in zip(torch.load(folder / "final.pt"), reference, strict=True):
        found, expected = dict(flat(found)), dict(flat(expected))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if exact:
                assert torch.equal(found[name], value), name
            else:
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="kills ranks of gloo; the manager is the same on GPUs")
def test_no_kill_loses_a_complete_checkpoint(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    code, words = torchrun(whole, Plan(STEPS, asynchronous=False), RANKS, RESTARTS)
    assert code == 0, words
    reference = torch.load(whole / "final.pt")
    killed = 0
    for seed in range(ROUNDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        plan, begin, end = plan_of(seed)
        if end < begin:
            kill_job(folder, plan, begin)
            code, words = torchrun(folder, Plan(STEPS, plan.asynchronous), end, RESTARTS)
        else:
            code, words = torchrun(folder, plan, begin, RESTARTS)
        assert code == 0, (plan, words)
        begun, kills = read_log(folder)
        # The second one does not come where the first came after all was done.
        assert 1 <= kills <= len(plan.kills), plan
        lost = [(step, complete) for step, complete in begun if step < complete]
        assert not lost, (plan, begun)
        same(folder, reference, exact=begin == end == RANKS)
        complete, skipped = find(folder / "saved")
        # Two are kept; a third one stays where a kill came before the last save removed it.
        kept = [manifest.step for _, manifest in complete]
        assert len(kept) > 0, plan
        assert kept == [STEPS, STEPS - 1, STEPS - 2][: len(kept)], plan
        assert not skipped, plan
        killed += kills
        moments = ", ".join(f"rank {k.rank} in {k.phase} {k.step}" for k in plan.kills)
        print(f"round {seed}: {begin} to {end} ranks, {moments}; began after {begun}", flush=True)
    print(f"{ROUNDS} rounds, {killed} kills, no complete checkpoint lost")
