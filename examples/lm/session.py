# SPDX-License-Identifier: Apache-2.0
"""One run on all ranks: check the input, train, save, compare, report."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from lm.checkpoint import Progress, find, load, make_manager, save
from lm.config import Config
from lm.data import Corpus, load_corpus
from lm.errors import BadInputError, CheckFailedError, StoppedError
from lm.progress import peak_memory_nbytes, progress
from lm.ranks import Ranks
from lm.reference import compare, train_alone
from lm.report import Result, write_report
from lm.train import Step, make_sharded_model, make_sharded_optimizers, train, validate
from vescale.fsdp import inspect
from vescale.fsdp.checkpoint import CheckpointManager

UNTIMED_STEPS = 2  # the first ones also allocate and warm caches


def run_session(config: Config, ranks: Ranks) -> None:
    """Do all that the options ask for. Raises the errors of ``lm.errors``, on all ranks alike."""
    corpus = ranks.check(lambda: _read_inputs(config, ranks))
    manager = make_manager(config)
    start = _find_start(config, manager)
    model = make_sharded_model(config, ranks, config.seed)
    optimizers = make_sharded_optimizers(config, model)
    if start.checkpoint:
        load(manager, start.checkpoint, model, optimizers)
    layout = inspect.layout(model)
    _introduce(config, ranks, corpus, start, layout)

    steps, checkpoint = _train(config, ranks, corpus, model, optimizers, start, manager)
    timed = steps[UNTIMED_STEPS:] or steps
    tokens = ranks.world_size * config.batch_size * config.seq_len
    result = Result(
        world_size=ranks.world_size,
        device=str(ranks.device.type),
        losses=[*start.losses, *(step.loss for step in steps)],
        validation_loss=validate(config, ranks, corpus, model),
        tokens_per_second=tokens * len(timed) / sum(step.seconds for step in timed),
        train_seconds=sum(step.seconds for step in steps),
        peak_memory_nbytes=ranks.gather(peak_memory_nbytes(ranks.device)),
        checkpoint=str(checkpoint) if checkpoint else None,
    )
    print(f"Loss {result.losses[0]:.4f} to {result.losses[-1]:.4f}, held-out text ", end="")
    print(f"{result.validation_loss:.4f}; {result.tokens_per_second:,.0f} tokens/s.")

    if checkpoint and config.reload_check:
        _check_reload(config, ranks, corpus, manager, checkpoint, result.validation_loss)
    if config.compare:
        result = _compare(config, ranks, corpus, result)
    if ranks.leads:
        names = write_report(Path(config.output_dir), config, result, layout)
        print(f"Wrote {', '.join(names)} to {config.output_dir}.")
        if len(names) == 1:
            print("Pictures need matplotlib: pip install matplotlib")
    if result.difference and not result.difference.acceptable:
        raise CheckFailedError("the losses differ from those of one process by more than allowed.")


def _read_inputs(config: Config, ranks: Ranks) -> Corpus:
    corpus = load_corpus(config.data, config.seq_len, config.seed)
    if ranks.leads:  # the only one that writes there
        _check_writable("--output-dir", config.output_dir)
    if config.checkpoint_dir:
        _check_writable("--checkpoint-dir", config.checkpoint_dir)
    return corpus


def _find_start(config: Config, manager: CheckpointManager) -> Progress:
    start = find(config, manager)
    if config.compare and start.checkpoint:
        raise BadInputError(
            "--compare starts at the first step, but --resume auto found "
            f"{start.checkpoint.path}; leave out one of them, or pass an empty --checkpoint-dir."
        )
    return start


def _check_writable(option: str, folder: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInputError(
            f"{option} {folder}: {error.strerror or error}; pass a folder that can be written to."
        ) from error


def _introduce(
    config: Config, ranks: Ranks, corpus: Corpus, start: Progress, layout: inspect.Layout
) -> None:
    kind = "tied" if not config.untied else "untied"
    print(f"Text:   {corpus.source}, {len(corpus.train):,} bytes to train on")
    print(f"Model:  {config.model_size}, {kind} head, {config.param_dtype}, {config.optimizer}")
    print(f"Ranks:  {ranks.world_size} on {ranks.device.type}")
    print(f"Layout: {layout.summary()}", flush=True)
    if start.checkpoint:
        print(f"Resumed from {start.checkpoint.path}, after step {start.step}.", flush=True)


def _train(
    config: Config,
    ranks: Ranks,
    corpus: Corpus,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    start: Progress,
    manager: CheckpointManager,
) -> tuple[list[Step], Path | None]:
    """Train to the end, saving on the way; raise StoppedError once that is agreed and saved."""
    done, checkpoint = [], None
    bar = progress("training", start.step, config.steps, ranks.device, show=ranks.leads)
    with bar as report:
        for step in train(config, ranks, corpus, model, optimizers, start):
            done.append(step)
            tokens = ranks.world_size * config.batch_size * config.seq_len
            report(step.step, step.loss, tokens / step.seconds)
            due = config.checkpoint_every and step.step % config.checkpoint_every == 0
            if config.checkpoint_dir and (due or step.stop or step.step == config.steps):
                losses = (*start.losses, *(earlier.loss for earlier in done))
                reached = Progress(step.step, step.windows, losses)
                checkpoint = save(manager, model, optimizers, reached, config)
            if step.stop:
                manager.wait()
                kept = f"; go on with --resume {checkpoint}" if checkpoint else ""
                raise StoppedError(f"stopped after step {step.step} of {config.steps}{kept}.")
    manager.wait()
    return done, checkpoint


def _check_reload(
    config: Config,
    ranks: Ranks,
    corpus: Corpus,
    manager: CheckpointManager,
    checkpoint: Path,
    expected: float,
) -> None:
    """Read ``checkpoint`` into a model with other weights, which must then predict the same."""
    fresh = make_sharded_model(config, ranks, config.seed + 1)
    load(manager, checkpoint, fresh)
    again = validate(config, ranks, corpus, fresh)
    if again != expected:
        raise CheckFailedError(
            f"{checkpoint}, loaded into a fresh model, gives the loss {again} on held-out text "
            f"and not {expected}."
        )
    print(f"Saved {checkpoint}; loaded into a fresh model it gives the same loss.", flush=True)


def _compare(config: Config, ranks: Ranks, corpus: Corpus, result: Result) -> Result:
    """Train on the first rank alone, while the others wait, and compare the losses."""
    alone = train_alone(config, corpus, ranks.world_size, ranks.device)
    reference = []
    bar = progress("one process", 0, config.steps, ranks.device, show=ranks.leads)
    with bar as report:
        for step in range(1, config.steps + 1):
            if ranks.leads:
                reference.append(next(alone))
                report(step, reference[-1], None)
            if ranks.mean(0.0)[1]:
                raise StoppedError(f"stopped after step {step} of the comparison.")
    if not ranks.leads:
        return result
    difference = compare(config, result.losses, reference)
    print("Against one process: ", end="")
    if difference.largest == 0:
        print(f"all {config.steps} losses are equal, bit for bit.")
    else:
        print(
            f"the losses differ by at most {difference.largest:.1e} of their value, at step "
            f"{difference.step + 1}; allowed is {difference.tolerance:.0e}."
        )
    return dataclasses.replace(result, reference_losses=reference, difference=difference)
