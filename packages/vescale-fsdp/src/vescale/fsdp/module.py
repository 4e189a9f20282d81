# SPDX-License-Identifier: Apache-2.0
"""What ``fully_shard`` makes of a module: its own class, plus gathering around its forward."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from vescale.dtensor import Replicate, Shard, distribute_tensor, is_ragged_shard
from vescale.fsdp.comm_settings import CommSettings
from vescale.fsdp.copying import copy_wrapped
from vescale.fsdp.gather_settings import GatherSettings
from vescale.fsdp.managed import Managed
from vescale.fsdp.param_group import ParamGroup
from vescale.fsdp.reduce_settings import ReduceSettings
from vescale.fsdp.saved_tensors import saved_tensor_watch
from vescale.fsdp.schedule import Schedule
from vescale.fsdp.unit import Unit
from vescale.fsdp.units import UNIT, param_groups, unit_of, units_of


class UnshardHandle:
    """A gather under way; see ``FSDPModule.unshard``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait until the full parameters are in their modules. Further calls do nothing."""
        if self._unit is not None:
            self._unit.unshard()
            self._unit = None


class FSDPModule(GatherSettings, ReduceSettings, CommSettings):
    """Mixed into a module's class by ``fully_shard``.

    Calling the module, or its ``forward``, gathers its parameters, runs it and frees them. At all
    other times its parameters are sharded DTensors.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        # Containers build slices of themselves with type(self)(...): those are plain modules.
        at = cls.__mro__.index(FSDPModule) + len(FSDPModule.__mro__) - 1  # what it was mixed into
        return cls.__mro__[at](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, super().__call__, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; a direct call gathers as calling the module does."""
        return _run(self, super().forward, args, kwargs)

    # --- gathering by hand ------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters (not those of wrapped submodules).

        With ``async_op`` the gather is only launched; ``wait()`` of the returned handle, or the
        next forward, completes it. ``reshard()`` or the next forward frees the memory.
        """
        unit = unit_of(self)
        if async_op:
            unit.prefetch()
            return UnshardHandle(unit)
        unit.unshard()
        return None

    def reshard(self) -> None:
        """Free this module's full parameters and put the sharded ones in place."""
        unit = unit_of(self)
        unit.reshard()
        unit.drop_kept()
        unit.drop_unclaimed()
        unit.settle()

    def reset_iter_state(self) -> None:
        """Recover after an exception in forward or backward: drop gradients not yet reduced, free
        full parameters, forget the iteration. Every rank must call it."""
        unit = unit_of(self)
        if unit.schedule is not None:
            unit.schedule.reset(drop_gradients=True)

    # --- what nn.Module does with parameters ------------------------------------------------

    def __deepcopy__(self, memo: dict) -> nn.Module:
        """Return an independent copy, sharded alike; gradients not yet reduced are not copied."""
        return copy_wrapped(self, UNIT, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: its parameters live on several ranks. Save "
            "model.state_dict() with torch.distributed.checkpoint, and load it into a model that "
            "is built and wrapped anew."
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state dict with sharded parameters, as DTensors, without communication."""
        for unit in units_of(self, recurse=False):
            unit.reshard()
        return super().state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, also of sharded parameters while modules hold the full ones."""
        super().zero_grad(set_to_none)
        for unit in units_of(self, recurse=True):
            for group in unit.groups:
                group.zero_grad(set_to_none)

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        unit = unit_of(self)
        unit.reshard()
        for group in unit.groups:
            group.prepare_move()
        super()._apply(fn, recurse)
        for group in unit.groups:
            group.adopt_moved()
        return self

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, local_metadata: dict, *args: Any
    ) -> None:
        unit = unit_of(self)
        unit.reshard()
        unit.settle()
        assign = local_metadata.get("assign_to_params_buffers", False)
        for group, index, names in _managed_names(self, unit):
            for name in names:
                key = prefix + name
                if isinstance(state_dict.get(key), torch.Tensor):
                    state_dict[key] = _loadable(group, index, state_dict[key], assign=assign)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _run(module: FSDPModule, inner: Callable, args: tuple, kwargs: dict) -> Any:
    unit = unit_of(module)
    if unit.entered:  # forward() inside of __call__(), or a module that calls itself
        return inner(*args, **kwargs)
    if unit.schedule is None:
        _become_root(module)
    unit.entered = True
    try:
        args, kwargs = unit.before_forward(args, kwargs)
        with saved_tensor_watch():
            output = inner(*args, **kwargs)
        return unit.after_forward(output)
    except BaseException:
        unit.schedule.abort_forward()
        raise
    finally:
        unit.entered = False


def _become_root(module: nn.Module) -> None:
    """Put all units under ``module`` on one schedule."""
    schedule = Schedule()
    param_groups(module)  # names them
    for unit in units_of(module, recurse=True):
        unit.join(schedule)
        unit.is_root = unit.module() is module


def _managed_names(module: nn.Module, unit: Unit) -> Iterator[tuple[ParamGroup, int, list[str]]]:
    """Yield (group, index, names relative to ``module``) of the parameters placed in it."""
    prefixes = {id(m): f"{name}." if name else "" for name, m in module.named_modules()}
    for group in unit.all_groups:
        for index, item in enumerate(group.managed):
            names = [
                prefixes[id(m)] + name
                for ref, name in item.slots
                if (m := ref()) is not None and id(m) in prefixes
            ]
            yield group, index, names


def _loadable(group: ParamGroup, index: int, value: torch.Tensor, *, assign: bool) -> torch.Tensor:
    """Return what ``_load_from_state_dict`` can take for a sharded parameter.

    No communication, but for DTensors as FSDP2 cuts tensor-parallel parameters.
    """
    item: Managed = group.managed[index]
    target = item.sharded
    if value.shape != target.shape or value is target:
        return value  # torch's own error names the parameter and both shapes
    if not hasattr(value, "device_mesh"):
        value = distribute_tensor(
            value.detach(), item.spec.mesh, item.spec.placements, src_data_rank=None
        )
    elif not all(is_ragged_shard(p) or type(p) in (Shard, Replicate) for p in value.placements):
        value = value.detach().redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    if not assign:
        return value
    # The parameter stays the one that the buffer holds: it takes the values over.
    group.materialize()
    with torch.no_grad():
        target.copy_(value)
    return target
