# SPDX-License-Identifier: Apache-2.0
"""Refuse the step of an optimizer that was built before the wrap: it would change nothing.

Such an optimizer holds the parameters that were replaced, which no module uses any more and which
never get a gradient. Each optimizer is looked through at its first step, and again after a wrap.
"""

import weakref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from vescale.fsdp.managed import OWNER_ATTRIBUTE

_looked_through: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_wraps = 0


def note_wrap() -> None:
    """Note that parameters were replaced; from the first time on, optimizers are looked through."""
    global _wraps
    if not _wraps:
        register_optimizer_step_pre_hook(_before_step)
    _wraps += 1


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if torch.compiler.is_compiling():
        return
    now = _wraps, len(optimizer.param_groups)
    if _looked_through.get(optimizer) == now:
        return
    replaced = [
        owner
        for group in optimizer.param_groups
        for param in group["params"]
        if (owner := getattr(param, OWNER_ATTRIBUTE, None)) is not None
        and owner[0]() is not None  # else the wrapped model is gone
    ]
    if replaced:
        group, index = replaced[0][0](), replaced[0][1]
        fqn = ".".join(filter(None, (group.name, group.managed[index].fqn)))
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(replaced)} parameters that fully_shard has "
            f"replaced, such as {fqn}, and its step would change no model; build the optimizer "
            "after the last fully_shard call, from model.parameters()."
        )
    _looked_through[optimizer] = now
