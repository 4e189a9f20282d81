# SPDX-License-Identifier: Apache-2.0
"""Deep copies of wrapped modules: independent, sharded alike, and trainable."""

import copy
import weakref
from typing import Any

from torch import nn

from vescale.fsdp.param_group import ParamGroup
from vescale.fsdp.unit import Unit

_PENDING = "vescale.fsdp: wrapped modules whose units are still to be copied"


def copy_wrapped(module: nn.Module, attribute: str, memo: dict) -> nn.Module:
    """Return a deep copy of ``module``, whose unit is in its ``__dict__`` under ``attribute``.

    Units are copied when the outermost wrapped module has been: a tie may lead anywhere in it.
    """
    outermost = _PENDING not in memo
    pending: list[tuple[Unit, nn.Module]] = memo.setdefault(_PENDING, [])
    unit: Unit = module.__dict__[attribute]
    unit.reshard()
    fresh = object.__new__(type(module))
    memo[id(module)] = fresh
    state = {name: value for name, value in module.__dict__.items() if name != attribute}
    fresh.__dict__.update(copy.deepcopy(state, memo))
    pending.append((unit, fresh))
    if outermost:
        del memo[_PENDING]
        groups = {
            group: _copy_group(group, memo) for source, _ in pending for group in source.groups
        }
        for source, target in pending:
            target.__dict__[attribute] = _copy_unit(source, target, groups)
    return fresh


def _copy_group(group: ParamGroup, memo: dict[int, Any]) -> ParamGroup:
    managed = [
        item.twin(
            slots=[
                (weakref.ref(memo[id(module)]), name)
                for ref, name in item.slots
                if (module := ref()) is not None and id(module) in memo
            ],
            sharded=memo[id(item.sharded)],
        )
        for item in group.managed
    ]
    return group.twin(managed)


def _copy_unit(unit: Unit, module: nn.Module, groups: dict[ParamGroup, ParamGroup]) -> Unit:
    fresh = Unit(
        module,
        [groups[group] for group in unit.groups],
        [groups[group] for group in unit.borrowed if group in groups],
        unit.policy,
        unit.reshard_after_forward,
    )
    fresh.reshard_after_backward = unit.reshard_after_backward
    return fresh
