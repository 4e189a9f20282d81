# SPDX-License-Identifier: Apache-2.0
"""The example as its users start it: whole runs on two ranks, ended well, badly, or by Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lm.main import run
from lm.stop import StopRequest
from testing.ranks import DEVICE

ROOT = Path(__file__).parents[1]
SCRIPT = "examples/train_lm.py"
RANKS = 2 if DEVICE == "cpu" else min(2, torch.cuda.device_count())
TINY = (
    *("--model-size", "tiny", "--seq-len", "64", "--batch-size", "2", "--steps", "8"),
    *("--device", DEVICE, "--threads", "1"),
)
LAUNCH = (sys.executable, SCRIPT, "--nproc", str(RANKS))
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
    *("--nproc-per-node", str(RANKS), SCRIPT),
)


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str


def start(command, *options):
    return subprocess.Popen(
        [*command, *map(str, options)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, as a shell gives it
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"did not end:\n{process.communicate()}")
    return Run(process.returncode, out, err)


def train(command, *options):
    return finish(start(command, *TINY, *options))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One uninterrupted run under plain torchrun, with all that it writes."""
    folder = tmp_path_factory.mktemp("whole")
    files = ("--output-dir", folder, "--checkpoint-dir", folder / "saved")
    done = train(TORCHRUN, "--compare", "--checkpoint-every", "4", *files)
    assert done.code == 0, done.err
    return folder, json.loads((folder / "run.json").read_text()), done


def test_the_loss_falls_and_follows_one_process(whole):
    _, facts, done = whole
    assert len(facts["losses"]) == 8
    assert facts["losses"][-1] < facts["losses"][0] - 0.3
    assert facts["validation_loss"] < facts["losses"][0] - 0.3
    if DEVICE == "cpu":
        assert facts["reference_losses"] == facts["losses"]
        assert "all 8 losses are equal, bit for bit" in done.out
    else:
        assert facts["difference"]["largest"] <= facts["difference"]["tolerance"]


@pytest.mark.parametrize("optimizer", ["adamw8bit", "soap"])
def test_other_optimizers_follow_one_process_and_reload(optimizer, tmp_path):
    files = ("--output-dir", tmp_path, "--checkpoint-dir", tmp_path / "saved")
    done = train(LAUNCH, "--optimizer", optimizer, "--compare", *files)
    assert done.code == 0, done.err
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["losses"][-1] < facts["losses"][0] - 0.2
    if DEVICE == "cpu":
        assert facts["reference_losses"] == facts["losses"]


def test_cuts_that_the_optimizer_cannot_use_are_refused(tmp_path):
    options = ("--optimizer", "adamw8bit", "--granularity", "elements")
    done = train(LAUNCH, *options, "--output-dir", tmp_path)
    if RANKS > 1:
        assert done.code == 2
        assert "granularity_for" in done.err


def test_a_run_says_what_it_did_once_and_without_noise(whole):
    _, facts, done = whole
    for words in ("Text: ", "Layout: 3 groups", "step 8/8", "it gives the same loss", "layout.png"):
        assert done.out.count(words) == 1 + (words == "step 8/8"), words
    noise = [line for line in done.err.splitlines() if "torch/distributed/run.py" not in line]
    assert not noise
    assert facts["world_size"] == RANKS == len(facts["peak_memory_nbytes"])
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["tokens_per_second"] > 0
    padding = sum(group["padding_elements"] for group in facts["layout"]["groups"])
    assert padding == pytest.approx(facts["layout"]["padding"] * facts["layout"]["elements"])


def test_pictures_and_complete_checkpoints_are_left_behind(whole):
    folder, _, _ = whole
    for name in ("loss.png", "layout.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    saved = sorted(path.name for path in (folder / "saved").iterdir())
    assert saved == ["step-000000004", "step-000000008"]


def test_a_resumed_run_continues_the_same_curve(whole, tmp_path):
    folder, facts, _ = whole
    shutil.copytree(folder / "saved/step-000000004", tmp_path / "step-000000004")
    files = ("--output-dir", tmp_path, "--checkpoint-dir", tmp_path)
    done = train(LAUNCH, "--resume", "auto", *files)
    assert done.code == 0, done.err
    again = json.loads((tmp_path / "run.json").read_text())
    for name in ("losses", "validation_loss"):
        if DEVICE == "cpu":
            assert again[name] == facts[name]
        else:
            assert again[name] == pytest.approx(facts[name], rel=1e-4)


def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_another_granularity(whole, tmp_path):
    folder, facts, _ = whole
    options = ("--resume", folder / "saved/step-000000004", "--granularity", "elements")
    # The same windows in every step: twice as many for half the ranks.
    alone = ("--batch-size", 2 * RANKS, "--output-dir", tmp_path)
    done = train((sys.executable, SCRIPT), *options, *alone)
    assert done.code == 0, done.err
    losses = json.loads((tmp_path / "run.json").read_text())["losses"]
    assert losses == pytest.approx(facts["losses"], rel=1e-3)


def test_mixed_precision_and_an_untied_head_follow_one_process_too(tmp_path):
    options = ("--optimizer", "adamw", "--untied", "--param-dtype", "bfloat16", "--compare")
    done = train(LAUNCH, *options, "--output-dir", tmp_path)
    assert done.code == 0, done.err
    assert "Against one process: " in done.out
    assert "untied head, bfloat16, adamw" in done.out


@pytest.mark.parametrize(
    ("broken", "replacement", "words"),
    [
        ("train_alone", lambda *_: iter([1.0] * 8), "differ from those of one process"),
        ("load", lambda *_: None, "gives the loss"),
    ],
)
def test_a_run_whose_own_check_fails_ends_with_1(
    broken, replacement, words, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(f"lm.session.{broken}", replacement)
    files = ("--output-dir", tmp_path / "out", "--checkpoint-dir", tmp_path / "saved")
    options = [*TINY, *map(str, files), "--compare"]
    assert run(options, StopRequest()) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [LAUNCH, TORCHRUN], ids=["python", "torchrun"])
def test_bad_input_is_named_once_by_all_ranks_together(command, tmp_path):
    missing = tmp_path / "missing.txt"
    done = train(command, "--data", missing, "--output-dir", tmp_path / "out")
    assert done.err.count(f"train_lm.py: --data {missing}: No such file or directory") == 1
    assert "step" not in done.out
    if command is LAUNCH:
        assert done.code == 2
        assert len(done.err.splitlines()) == 1
    else:
        assert done.code == 1  # torchrun's own; its report names that of the rank
        assert "exitcode  : 2" in done.err


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    for option in ("--output-dir", "--checkpoint-dir"):
        files = {"--output-dir": tmp_path / "out", option: tmp_path / "file" / "inside"}
        options = [word for pair in files.items() for word in pair]
        done = train((sys.executable, SCRIPT), *options)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"train_lm.py: {option} {tmp_path}/file/inside: Not a directory")
        assert len(done.err.splitlines()) == 1


def wait_for_training(process):
    for line in process.stdout:
        if " step " in line:
            return
    pytest.fail(f"ended before it trained: {process.communicate()}")


@pytest.mark.parametrize("target", ["Ctrl-C", "one rank"])
def test_all_ranks_stop_at_the_same_step_when_asked_to(target, tmp_path):
    files = ("--output-dir", tmp_path / "out", "--checkpoint-dir", tmp_path / "saved")
    process = start(LAUNCH, *TINY, "--steps", "100000", *files)
    wait_for_training(process)
    if target == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    else:
        os.kill(newest_child(process.pid), signal.SIGTERM)  # as a scheduler may
    done = finish(process)
    assert done.code == 130
    (line,) = done.err.splitlines()
    (saved,) = (tmp_path / "saved").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert line.startswith(f"train_lm.py: stopped after step {step} of 100000; go on with --resume")
    facts = json.loads((saved / "checkpoint.json").read_text())
    assert facts["step"] == step == len(facts["progress"]["losses"])
    assert (saved / ".metadata").exists()
    assert not list((tmp_path / "out").iterdir())


def newest_child(parent):
    found = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True)
    pairs = [tuple(map(int, line.split())) for line in found.stdout.splitlines()]
    return max(pid for pid, its_parent in pairs if its_parent == parent)
