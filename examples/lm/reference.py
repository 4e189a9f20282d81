# SPDX-License-Identifier: Apache-2.0
"""The same training in one process, to compare the losses with.

With stock torch, but for the optimizers that torch has not.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.func import functional_call
from torch.optim import Muon

from lm.config import Config
from lm.data import Corpus
from lm.model import SIZES, Decoder, next_byte_loss
from lm.optimizers import as_dtype, make_optimizers, set_rate, update

# Relative. On one or two ranks the losses are the same bits, since a + b == b + a. More ranks add
# their gradients in another order than one process does, and that rounding grows step by step:
# measured over 240 steps on 3 ranks 1e-6 with AdamW, 3e-3 with Muon, which amplifies it (it works
# in bfloat16, where the last bit is 1/256), and 9e-3 when the model computes in bfloat16.
TOLERANCES = {("adamw", "float32"): 1e-3, ("muon", "float32"): 2e-2}  # others: the next line
LOW_PRECISION_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative difference between two loss curves, and where it is."""

    largest: float
    step: int
    tolerance: float

    @property
    def acceptable(self) -> bool:
        """Whether it is within the tolerance; NaN is not."""
        return self.largest <= self.tolerance


def train_alone(
    config: Config, corpus: Corpus, world_size: int, device: torch.device
) -> Iterator[float]:
    """Yield the losses of training unsharded on all ranks' batches, one after the other."""
    torch.manual_seed(config.seed)
    model = Decoder(SIZES[config.model_size], config.seq_len, tied=not config.untied).to(device)
    optimizers = make_optimizers(config, model, Muon)
    compute = _computing_in(model, as_dtype(config.param_dtype))
    for step in range(config.steps):
        set_rate(optimizers, config, step)
        losses = []
        for rank in range(world_size):
            first = (step * world_size + rank) * config.batch_size
            loss = next_byte_loss(compute, corpus.batch(first, config.batch_size).to(device))
            (loss / world_size).backward()
            losses.append(loss.item())
        update(optimizers)
        yield sum(losses) / world_size


def compare(config: Config, losses: list[float], reference: list[float]) -> Difference:
    """Return how far the sharded run's losses are from the reference's."""
    pairs = zip(losses, reference, strict=True)
    relative = [abs(loss - wanted) / abs(wanted) for loss, wanted in pairs]
    # NaN is the largest of all: it must not pass.
    step = max(range(len(relative)), key=lambda i: (relative[i] != relative[i], relative[i]))
    default = TOLERANCES.get((config.optimizer, config.param_dtype), LOW_PRECISION_TOLERANCE)
    return Difference(relative[step], step, config.tolerance or default)


def _computing_in(model: Decoder, dtype: torch.dtype):
    """Return a function like ``model`` that computes in ``dtype`` with gradients in the stored one.

    What mixed precision does: each parameter is cast once per forward, its gradient once back.
    """
    if dtype == torch.float32:
        return model

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
        return functional_call(model, cast, (tokens,))

    return forward
