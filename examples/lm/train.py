# SPDX-License-Identifier: Apache-2.0
"""The sharded training itself: wrap the model, then an ordinary loop."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from lm.checkpoint import Progress
from lm.config import Config
from lm.data import Corpus
from lm.errors import BadInputError
from lm.model import SIZES, Decoder, next_byte_loss
from lm.optimizers import as_dtype, make_optimizers, set_rate, update
from lm.ranks import Ranks
from vescale.fsdp import BlockScaled, MixedPrecisionPolicy, fully_shard, granularity_for
from vescale.fsdp.granularity import parse_granularity
from vescale.fsdp.optim import Muon

VALIDATION_WINDOWS = 16  # per rank


@dataclass(frozen=True, slots=True)
class Step:
    """What is known after a step: how far the run is, and the mean loss of all ranks' batches.

    ``seconds`` is the time of this step alone. With ``stop`` the ranks have agreed to end here.
    """

    step: int
    windows: int
    loss: float
    seconds: float
    stop: bool


def make_sharded_model(config: Config, ranks: Ranks, seed: int) -> nn.Module:
    """Return a decoder of which each rank stores its part; every rank must pass the same seed.

    Raises BadInputError for a granularity that does not fit.
    """
    torch.manual_seed(seed)
    model = Decoder(SIZES[config.model_size], config.seq_len, tied=not config.untied)
    model.to(ranks.device)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=as_dtype(config.param_dtype), reduce_dtype=torch.float32
        ),
    }
    try:
        for layer in model.layers:
            fully_shard(layer, **options, **layer_options(config))
        return fully_shard(model, **options, granularity=granularity_of(config))
    except ValueError as error:  # on all ranks alike: a granularity that no matrix here has
        raise BadInputError(f"--granularity {config.granularity}: {error}") from error


def granularity_of(config: Config):
    """Return where matrices may be cut: as asked, or as the optimizer wants it."""
    if config.granularity == "auto":
        return granularity_for(config.optimizer)
    return parse_granularity(config.granularity)


def layer_options(config: Config) -> dict:
    """Return how a layer may be cut, and what its weights are sent as."""
    if config.gather_as == "parameters":
        return {"granularity": granularity_of(config)}
    codes = {"int8": torch.int8, "float8": torch.float8_e4m3fn}[config.gather_as]
    asked = None if config.granularity == "auto" else granularity_of(config)
    return {"granularity": asked, "gather_as": BlockScaled(codes, block=32)}


def make_sharded_optimizers(config: Config, model: nn.Module) -> tuple[Optimizer, ...]:
    """Return the optimizers of a sharded model, each working on this rank's parts.

    Raises BadInputError for a granularity that the optimizer cannot work with.
    """
    try:
        return make_optimizers(config, model, Muon)
    except ValueError as error:  # on all ranks alike, before anything is sent
        raise BadInputError(f"--granularity {config.granularity}: {error}") from error


def train(
    config: Config,
    ranks: Ranks,
    corpus: Corpus,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    start: Progress,
) -> Iterator[Step]:
    """Train from ``start`` on, and yield after every step. The rates are in ``set_rate``."""
    windows = start.windows
    for step in range(start.step, config.steps):
        began = time.perf_counter()
        set_rate(optimizers, config, step)
        batch = corpus.batch(windows + ranks.rank * config.batch_size, config.batch_size)
        loss = next_byte_loss(model, batch.to(ranks.device))
        loss.backward()
        update(optimizers)
        mean, stop = ranks.mean(loss.item())
        windows += ranks.world_size * config.batch_size
        yield Step(step + 1, windows, mean, time.perf_counter() - began, stop)


@torch.no_grad()
def validate(config: Config, ranks: Ranks, corpus: Corpus, model: nn.Module) -> float:
    """Return the mean loss on held-out text, the same windows at every call."""
    batch = corpus.validation_batch(ranks.world_size * VALIDATION_WINDOWS)
    mine = batch.chunk(ranks.world_size)[ranks.rank].to(ranks.device)
    model.eval()
    losses = [next_byte_loss(model, part).item() for part in mine.split(config.batch_size)]
    model.train()
    return ranks.mean(sum(losses) / len(losses))[0]
