# SPDX-License-Identifier: Apache-2.0
"""Save and load a run with torch's distributed checkpoint: tensors, step, place in the text.

A checkpoint is written under a temporary name and renamed when it is complete: whatever is called
``step-...`` can be resumed from, and a crash leaves the ones before as they were.
"""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from lm.config import Config
from lm.errors import BadInputError
from lm.ranks import Ranks

PROGRESS = "progress.json"
MUST_AGREE = ("model_size", "untied", "optimizer")  # what the saved tensors depend on


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come: steps done, windows of the text seen, the losses on the way."""

    step: int = 0
    windows: int = 0
    losses: tuple[float, ...] = ()
    path: Path | None = None


def save(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    progress: Progress,
    config: Config,
    ranks: Ranks,
) -> Path:
    """Write a checkpoint below ``folder`` and return where it is. Collective."""
    final = folder / f"step-{progress.step:06d}"
    partial = folder / f".partial-{final.name}"
    if ranks.leads:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir(parents=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizers)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    if ranks.leads:
        facts = {
            "step": progress.step,
            "windows": progress.windows,
            "losses": progress.losses,
            "config": dataclasses.asdict(config),
        }
        (partial / PROGRESS).write_text(json.dumps(facts))
        _publish(partial, final)
    dist.barrier()
    return final


def load(path: Path, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
    """Read a checkpoint into ``model`` and, where they are passed, ``optimizers``. Collective.

    Any number of ranks with any granularity may have written it. Raises BadInputError.
    """
    model_state, optimizer_state = get_state_dict(model, optimizers)
    state = {"model": model_state}
    if optimizers:
        state["optimizer"] = optimizer_state
    try:
        dcp.load(state, checkpoint_id=path)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise BadInputError(f"{path} cannot be loaded ({reason}); pass an intact one.") from error
    set_state_dict(
        model, optimizers, model_state_dict=model_state, optim_state_dict=optimizer_state
    )


def find(config: Config) -> Progress:
    """Return the progress to go on from: that of the checkpoint of ``--resume``, or none.

    Raises BadInputError if there is no such checkpoint, or if it is of another model.
    """
    path = Path(config.resume or "")
    if config.resume == "auto":
        complete = [file.parent for file in Path(config.checkpoint_dir).glob(f"step-*/{PROGRESS}")]
        # The last one written: the folder may also hold those of an earlier, longer run.
        path = max(complete, key=lambda at: (at / PROGRESS).stat().st_mtime_ns, default="")
    if not config.resume or not path:
        return Progress()
    try:
        facts = json.loads((path / PROGRESS).read_text())
        saved = facts["config"]
        progress = Progress(facts["step"], facts["windows"], tuple(facts["losses"]), path)
    except (OSError, ValueError, KeyError) as error:
        raise BadInputError(
            f"--resume {path}: no complete checkpoint is there; pass a folder step-... that "
            "--checkpoint-dir has written, or auto."
        ) from error
    for name in MUST_AGREE:
        if saved.get(name) != getattr(config, name):
            option = f"--{name.replace('_', '-')}"
            raise BadInputError(
                f"--resume {path}: it was saved with {option} {saved.get(name)}, and this run has "
                f"{getattr(config, name)}; pass the same."
            )
    if progress.step >= config.steps:
        raise BadInputError(
            f"--resume {path}: it has {progress.step} steps already; pass more --steps."
        )
    return progress


def _publish(partial: Path, final: Path) -> None:
    if final.exists():  # an earlier run came as far: set it aside until the new one is there
        aside = final.with_name(f".old-{final.name}")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
        partial.rename(final)
        shutil.rmtree(aside)
    else:
        partial.rename(final)
