# SPDX-License-Identifier: Apache-2.0
"""Which optimizer trains which parameter, and the learning rate of every step."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lm.config import Config
from vescale.fsdp.optim import split_params

WARMUP_STEPS = 10
LAST_RATE = 0.1  # of the peak


def make_optimizers(
    config: Config, model: nn.Module, muon: type[Optimizer]
) -> tuple[Optimizer, ...]:
    """Return the optimizers of ``model``, sharded or not.

    Muon takes the matrices between embedding and head, and AdamW the rest; or AdamW takes all. One
    learning rate serves both, since ``match_rms_adamw`` gives Muon's updates the size of AdamW's.
    """
    if config.optimizer == "adamw":
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return (AdamW(groups, lr=config.lr, betas=(0.9, 0.95)),)
    matrices, others = split_params(model)
    return (
        muon(matrices, lr=config.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0),
    )


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
