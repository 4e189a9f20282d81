# SPDX-License-Identifier: Apache-2.0
"""One rank of a small training that is killed at a chosen moment; torchrun starts it again.

``python -m torch.distributed.run ... -m testing.fault_worker FOLDER PLAN``, with PLAN as JSON: see
``Plan``. It goes on from the newest checkpoint, and tells in FOLDER/log what it went on from, and
which checkpoints were complete when.
"""

import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from testing.models import VOCAB, build
from vescale.fsdp import fully_shard
from vescale.fsdp.checkpoint import CheckpointManager
from vescale.fsdp.checkpoint import folder as on_disk
from vescale.fsdp.state_dict import StateDictOptions, get_state_dict

TIMEOUT = timedelta(seconds=60)
SAMPLES = 12  # of all ranks together, so that 1, 2, 3 and 4 ranks see the same


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL ``rank`` in the ``attempt``-th time that training began, ``delay`` seconds after
    ``phase`` of ``step`` did; in phase "publish", before its ``delay``-th operation on files
    instead."""

    attempt: int
    rank: int
    phase: str
    step: int
    delay: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run does: steps, whether it saves behind, and when it is killed."""

    steps: int
    asynchronous: bool
    kills: tuple[Kill, ...] = ()

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def read(text: str) -> "Plan":
        data = json.loads(text)
        kills = tuple(Kill(**kill) for kill in data["kills"])
        return Plan(data["steps"], data["asynchronous"], kills)


class Moments:
    """Knows when this process is to be killed."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        log = folder / "log"
        begun = [log.read_text().count("from") if log.exists() else 0]
        dist.broadcast_object_list(begun)  # an attempt that could not connect does not count
        mine = [k for k in plan.kills if (k.attempt, k.rank) == (begun[0], dist.get_rank())]
        self._kill, self._folder = mine[0] if mine else None, folder

    def begin(self, phase: str, step: int) -> None:
        """Note that ``phase`` of ``step`` begins."""
        kill = self._kill
        if kill and (kill.phase, kill.step) == (phase, step):
            if phase == "publish":
                self._die_at_operation(int(kill.delay))
            else:
                threading.Timer(kill.delay, self._die).start()

    def _die(self) -> None:
        append(self._folder, "kill")
        os.kill(os.getpid(), signal.SIGKILL)

    def _die_at_operation(self, number: int) -> None:
        """Let this process die before its ``number``-th operation on files from now on."""
        left = number

        def counted(original):
            def call(*args, **kwargs):
                nonlocal left
                left -= 1
                if left < 0:
                    self._die()
                return original(*args, **kwargs)

            return call

        Path.rename = counted(Path.rename)
        shutil.rmtree = counted(shutil.rmtree)
        on_disk._write = counted(on_disk._write)
        on_disk._sync_folder = counted(on_disk._sync_folder)


def tell(folder: Path, *words: object) -> None:
    """Let the first rank add a line to the log."""
    if dist.get_rank() == 0:
        append(folder, *words)


def append(folder: Path, *words: object) -> None:
    """Add a line to the log that outlives this process."""
    line = " ".join(map(str, words)) + "\n"
    descriptor = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, line.encode())
    os.fsync(descriptor)
    os.close(descriptor)


def batch(step: int) -> torch.Tensor:
    """Return this rank's part of the tokens of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (SAMPLES, 6), generator=generator)
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def run(folder: Path, plan: Plan) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(tied=True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    moments = Moments(folder, plan)
    publish = on_disk.publish

    def publishing(partial: Path, manifest: on_disk.Manifest) -> Path:
        moments.begin("publish", manifest.step)
        return publish(partial, manifest)

    on_disk.publish = publishing
    saved = folder / "saved"
    manager = CheckpointManager(saved, keep_last=2, asynchronous=plan.asynchronous, timeout=TIMEOUT)
    restored = manager.load(model, optimizer)
    start = restored.checkpoint.step if restored else 0
    tell(folder, "from", start)
    for step in range(start + 1, plan.steps + 1):
        moments.begin("forward", step)
        loss = F.cross_entropy(model(tokens := batch(step)).flatten(0, 1), tokens.flatten())
        moments.begin("reduce", step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        moments.begin("save", step)
        if manager.wait():  # that of the step before, written behind this one
            tell(folder, "complete", step - 1)
        manager.save(step, model, optimizer)
        if not plan.asynchronous:
            tell(folder, "complete", step)
    manager.wait()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save(state, folder / "final.pt")
    tell(folder, "complete", plan.steps)
    tell(folder, "end")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)  # what cannot connect is started again
    run(Path(sys.argv[1]), Plan.read(sys.argv[2]))
    dist.destroy_process_group()
