# SPDX-License-Identifier: Apache-2.0
"""Refuse the step of an optimizer that holds the wrong parameters: it would change nothing.

One that was built before the wrap holds the parameters that were replaced, which no module uses any
more. One that was built while parameters were gathered holds these, which never get a gradient.
Each optimizer is looked through at its first step, and again after a wrap.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from vescale.fsdp.managed import OWNER_ATTRIBUTE
from vescale.fsdp.param_group import ParamGroup

_looked_through: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_groups: weakref.WeakSet[ParamGroup] = weakref.WeakSet()
_wraps = 0

Place = tuple[ParamGroup, int]


def note_wrap(groups: Iterable[ParamGroup]) -> None:
    """Note that ``groups`` manage parameters now.

    From the first time on, optimizers are looked through.
    """
    global _wraps
    if not _wraps:
        register_optimizer_step_pre_hook(_before_step)
    _wraps += 1
    _groups.update(groups)


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if torch.compiler.is_compiling():
        return
    now = _wraps, len(optimizer.param_groups)
    if _looked_through.get(optimizer) == now:
        return
    if replaced := _held(optimizer, _replaced_at):
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(replaced)} parameters that fully_shard has "
            f"replaced, such as {_fqn(*replaced[0])}, and its step would change no model; build "
            "the optimizer after the last fully_shard call, from model.parameters()."
        )
    gathered = {
        id(item.gathered): (group, index)
        for group in _groups
        for index, item in enumerate(group.managed)
        if item.gathered is not None
    }
    if wrong := _held(optimizer, lambda param: gathered.get(id(param))):
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(wrong)} gathered parameters of wrapped "
            f"modules, such as {_fqn(*wrong[0])}, and its step would change no model; call "
            "model.reshard(recurse=True) before building the optimizer from model.parameters()."
        )
    _looked_through[optimizer] = now


def _held(optimizer: Optimizer, place_of: Callable[[nn.Parameter], Place | None]) -> list[Place]:
    return [
        place
        for group in optimizer.param_groups
        for param in group["params"]
        if (place := place_of(param)) is not None
    ]


def _replaced_at(param: nn.Parameter) -> Place | None:
    owner: Any = getattr(param, OWNER_ATTRIBUTE, None)
    group = None if owner is None else owner[0]()  # None: the wrapped model is gone
    return None if group is None else (group, owner[1])


def _fqn(group: ParamGroup, index: int) -> str:
    return ".".join(filter(None, (group.name, group.managed[index].fqn)))
