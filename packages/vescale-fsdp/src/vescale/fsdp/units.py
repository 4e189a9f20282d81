# SPDX-License-Identifier: Apache-2.0
"""Find the units behind the modules of a model."""

from typing import TYPE_CHECKING

from torch import nn

from vescale.fsdp.param_group import ParamGroup
from vescale.fsdp.reduction import ReduceOptions
from vescale.fsdp.unit import Unit

if TYPE_CHECKING:
    ModuleMixin = nn.Module
else:  # what is mixed into a module's class, and so has its attributes
    ModuleMixin = object

UNIT = "_vescale_unit"  # in the instance's __dict__, past nn.Module.__setattr__


def find_unit(module: nn.Module) -> Unit | None:
    """Return the unit behind a wrapped module, None for any other module."""
    return module.__dict__.get(UNIT)


def unit_of(module: nn.Module) -> Unit:
    """Return the unit behind a wrapped module; raises ValueError for any other module."""
    unit = find_unit(module) if isinstance(module, nn.Module) else None
    if unit is None:
        raise ValueError(f"{type(module).__name__} is not wrapped; call fully_shard on it first.")
    return unit


def units_of(module: nn.Module, recurse: bool) -> list[Unit]:
    """Return the units of ``module`` and, with ``recurse``, of what is under it, each once."""
    modules = module.modules() if recurse else [module]
    return list({id(unit): unit for m in modules if (unit := find_unit(m)) is not None}.values())


def reduce_options_of(module: nn.Module, recurse: bool) -> list[ReduceOptions]:
    """Return the options of the reductions of ``units_of``, one for each parameter group."""
    return [group.reduce_options for unit in units_of(module, recurse) for group in unit.groups]


def groups_of(module: nn.Module, recurse: bool) -> list[ParamGroup]:
    """Return the parameter groups of ``units_of``."""
    return [group for unit in units_of(module, recurse) for group in unit.groups]


def param_groups(model: nn.Module) -> list[ParamGroup]:
    """Return the parameter groups of ``model``'s units, in the order of ``named_modules``.

    Each group's ``name`` is the FQN of its unit in ``model``, "" for the model itself; of a unit
    of several modules, all their FQNs, which ``group.parts`` has one by one.
    """
    parts: dict[int, list[str]] = {}
    units: dict[int, Unit] = {}
    for name, module in model.named_modules():
        unit = find_unit(module)
        if unit is not None:
            units[id(unit)] = unit
            parts.setdefault(id(unit), []).append(name)
    groups = [group for unit in units.values() for group in unit.groups]
    for key, unit in units.items():
        several = len(unit.modules) > 1
        for group in unit.groups:
            group.name = ", ".join(parts[key])
            group.parts = _in_order(unit, model) if several else ()
    return groups


def _in_order(unit: Unit, model: nn.Module) -> tuple[str, ...]:
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(names.get(id(module), type(module).__name__) for module in unit.modules)
