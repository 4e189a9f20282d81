# SPDX-License-Identifier: Apache-2.0
"""Which optimizer trains which parameter, and the learning rate of every step."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lm.config import Config
from vescale.fsdp.optim import SOAP, AdamW8bit, split_params

WARMUP_STEPS = 10
LAST_RATE = 0.1  # of the peak


def make_optimizers(
    config: Config, model: nn.Module, muon: type[Optimizer]
) -> tuple[Optimizer, ...]:
    """Return the optimizers of ``model``, sharded or not.

    Muon or SOAP takes the matrices between embedding and head, and AdamW the rest; or AdamW, with
    8-bit state or without, takes all. One learning rate serves both, since ``match_rms_adamw``
    gives Muon's updates the size of AdamW's. ``muon`` is ours, or torch's for a model that is not
    sharded.
    """
    options = {"lr": config.lr, "betas": (0.9, 0.95)}
    if config.optimizer in ("adamw", "adamw8bit"):
        named = list(model.named_parameters())
        groups = [
            {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ]
        kind = AdamW if config.optimizer == "adamw" else AdamW8bit
        return (kind(groups, **options),)
    matrices, others = split_params(model)
    if config.optimizer == "soap":
        first = SOAP(matrices, lr=config.lr, weight_decay=0.1)
    else:
        first = muon(matrices, lr=config.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return first, AdamW(others, weight_decay=0.0, **options)


def set_rate(optimizers: Sequence[Optimizer], config: Config, step: int) -> None:
    """Set the learning rate of ``step``: a short warm-up, then a straight line to a tenth.

    A function of the step alone, so there is no schedule to save.
    """
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    rate = config.lr * warmup * (1 - (1 - LAST_RATE) * step / config.steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def update(optimizers: Sequence[Optimizer]) -> None:
    """Take a step with the gradients, and drop them."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def as_dtype(name: str) -> torch.dtype:
    """Return the torch dtype that an option names."""
    return getattr(torch, name)
