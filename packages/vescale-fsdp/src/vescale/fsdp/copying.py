# SPDX-License-Identifier: Apache-2.0
"""Deep copies of wrapped modules: independent, sharded alike, and trainable."""

import copy
import weakref
from typing import Any

from torch import nn

from vescale.fsdp.early_optimizers import note_wrap
from vescale.fsdp.param_group import ParamGroup
from vescale.fsdp.unit import RUNS, Unit

_PENDING = "vescale.fsdp: wrapped modules whose units are still to be copied"


def copy_wrapped(module: nn.Module, attribute: str, memo: dict) -> nn.Module:
    """Return a deep copy of ``module``, whose unit is in its ``__dict__`` under ``attribute``.

    Units are copied when the outermost wrapped module has been: a tie may lead anywhere in it.
    Raises ValueError if a unit has modules, or uses a tied parameter, outside of what is copied.
    """
    outermost = _PENDING not in memo
    pending: list[tuple[Unit, nn.Module]] = memo.setdefault(_PENDING, [])
    unit: Unit = module.__dict__[attribute]
    unit.put_back()
    fresh = object.__new__(type(module))
    memo[id(module)] = fresh
    state = {
        name: value for name, value in module.__dict__.items() if name not in (attribute, RUNS)
    }
    fresh.__dict__.update(copy.deepcopy(state, memo))
    pending.append((unit, fresh))
    if outermost:
        del memo[_PENDING]
        units = {id(source): source for source, _ in pending}
        lent = {id(group) for source in units.values() for group in source.groups}
        for source in units.values():
            _check_complete(source, memo)
            _check_borrowed(source, lent)
        groups = {
            group: _copy_group(group, memo) for source in units.values() for group in source.groups
        }
        note_wrap(groups.values())
        copies = {key: _copy_unit(source, memo, groups) for key, source in units.items()}
        for key, source in units.items():
            for name in ("forward_prefetch", "backward_prefetch"):
                others = (id(unit) for ref in getattr(source, name) if (unit := ref()) is not None)
                found = [weakref.ref(copies[other]) for other in others if other in copies]
                setattr(copies[key], name, found)
        for source, target in pending:
            target.__dict__[attribute] = copies[id(source)]
    return fresh


def _check_complete(unit: Unit, memo: dict[int, Any]) -> None:
    for module in unit.modules:
        if id(module) not in memo:
            names = ", ".join(type(m).__name__ for m in unit.modules)
            raise ValueError(
                f"{type(module).__name__} is not part of what is copied, but in one call of "
                f"fully_shard with something that is ([{names}]); copy a module that holds all."
            )


def _check_borrowed(unit: Unit, lent: set[int]) -> None:
    for group in unit.borrowed:
        if id(group) not in lent:
            names = ", ".join(type(m).__name__ for m in unit.modules)
            raise ValueError(
                f"{names} uses a parameter ({group.managed[0].fqn}, or one beside it) of another "
                "wrapped module, to which it is tied, and that is not part of what is copied; copy "
                "a module that holds both."
            )


def _copy_group(group: ParamGroup, memo: dict[int, Any]) -> ParamGroup:
    managed = [
        item.twin(
            slots=[
                (weakref.ref(memo[id(module)]), name)
                for ref, name in item.slots
                if (module := ref()) is not None and id(module) in memo
            ],
            sharded=copy.deepcopy(item.sharded, memo),  # of a module that is gone: only here
        )
        for item in group.managed
    ]
    return group.twin(managed)


def _copy_unit(unit: Unit, memo: dict[int, Any], groups: dict[ParamGroup, ParamGroup]) -> Unit:
    fresh = Unit(
        [memo[id(module)] for module in unit.modules],
        [groups[group] for group in unit.groups],
        [groups[group] for group in unit.borrowed],
        unit.policy,
        unit.reshard_after_forward,
    )
    fresh.reshard_after_backward = unit.reshard_after_backward
    fresh.unshard_in_backward = unit.unshard_in_backward
    fresh.is_last_backward = unit.is_last_backward
    fresh.manual_finalization = unit.manual_finalization
    left = (memo.get(id(param)) for ref in unit.ignored if (param := ref()) is not None)
    fresh.ignored = [weakref.ref(param) for param in left if param is not None]
    return fresh
