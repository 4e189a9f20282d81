# SPDX-License-Identifier: Apache-2.0
"""Save a run and go on from it: what ``CheckpointManager`` keeps, and what this example adds.

The manager keeps tensors, optimizer states and random generators, publishes a checkpoint only when
it is complete, and finds the newest one. The example adds how far it is, and with which options.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from lm.config import Config
from lm.errors import BadInputError
from vescale.fsdp.checkpoint import Checkpoint, CheckpointManager

MUST_AGREE = ("model_size", "untied", "optimizer")  # what the saved tensors depend on


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come: steps done, windows of the text seen, the losses on the way."""

    step: int = 0
    windows: int = 0
    losses: tuple[float, ...] = ()
    checkpoint: Checkpoint | None = None


def make_manager(config: Config) -> CheckpointManager:
    """Return the manager of ``--checkpoint-dir``, or of where ``--resume`` is. Collective.

    It writes while training goes on.
    """
    folder = config.checkpoint_dir or Path(config.resume or "").parent
    return CheckpointManager(folder, keep_last=config.keep_last, asynchronous=True)


def save(
    manager: CheckpointManager,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    progress: Progress,
    config: Config,
) -> Path:
    """Start to write a checkpoint, and return where it will be. Collective."""
    facts = {
        "windows": progress.windows,
        "losses": progress.losses,
        "config": dataclasses.asdict(config),
    }
    return manager.save(progress.step, model, optimizers, progress=facts)


def load(
    manager: CheckpointManager,
    checkpoint: Checkpoint | Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
) -> None:
    """Read a checkpoint into ``model`` and, where they are passed, ``optimizers``. Collective.

    Any number of ranks with any granularity may have written it. Raises BadInputError.
    """
    try:
        manager.load(model, optimizers, checkpoint=checkpoint)
    except (ValueError, RuntimeError) as error:
        raise BadInputError(f"it cannot be loaded: {error}") from error


def find(config: Config, manager: CheckpointManager) -> Progress:
    """Return the progress to go on from: that of the checkpoint of ``--resume``, or none.

    Collective. Raises BadInputError if there is no such checkpoint, or if it is of another model.
    """
    if not config.resume:
        return Progress()
    found = manager.newest() if config.resume == "auto" else _at(config.resume, manager)
    if found is None:
        return Progress()
    facts = found.progress
    saved = facts.get("config", {})
    for name in MUST_AGREE:
        if saved.get(name) != getattr(config, name):
            option = f"--{name.replace('_', '-')}"
            raise BadInputError(
                f"--resume {found.path}: it was saved with {option} {saved.get(name)}, and this "
                f"run has {getattr(config, name)}; pass the same."
            )
    if found.step >= config.steps:
        raise BadInputError(
            f"--resume {found.path}: it has {found.step} steps already; pass more --steps."
        )
    return Progress(found.step, facts["windows"], tuple(facts["losses"]), found)


def _at(path: str, manager: CheckpointManager) -> Checkpoint:
    try:
        found = manager.at(path)
    except ValueError as error:
        raise BadInputError(f"--resume: {error}") from error
    if not found.progress:
        raise BadInputError(
            f"--resume {path}: no complete checkpoint is there; pass a folder step-... that "
            "--checkpoint-dir has written, or auto."
        )
    return found
