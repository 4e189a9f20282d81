# SPDX-License-Identifier: Apache-2.0
"""What ``fully_shard`` makes of a module: its own class, plus gathering around its forward."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from vescale.dtensor import Replicate, Shard, distribute_tensor, is_ragged_shard
from vescale.fsdp._torch_compat import untraced
from vescale.fsdp.arguments import check_bool
from vescale.fsdp.comm_settings import CommSettings
from vescale.fsdp.copying import copy_wrapped
from vescale.fsdp.finalization import BackwardFinalization
from vescale.fsdp.gather_settings import GatherSettings
from vescale.fsdp.inference import ordinary_tensors
from vescale.fsdp.managed import Managed
from vescale.fsdp.param_group import ParamGroup
from vescale.fsdp.reduce_settings import ReduceSettings
from vescale.fsdp.saved_tensors import saved_tensor_watch
from vescale.fsdp.schedule import Schedule
from vescale.fsdp.strangers import warn_of_strangers
from vescale.fsdp.unit import RUNS, Unit
from vescale.fsdp.units import UNIT, param_groups, unit_of, units_of


class UnshardHandle:
    """A gather under way; see ``FSDPModule.unshard``."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = tuple(units)

    def wait(self) -> None:
        """Wait until the full parameters are in their modules. Further calls do nothing."""
        for unit in self._units:
            unit.unshard()
        self._units = ()


class FSDPModule(GatherSettings, ReduceSettings, BackwardFinalization, CommSettings):
    """Mixed into a module's class by ``fully_shard``.

    Calling the module, or its ``forward``, gathers its parameters, runs it and frees them. At all
    other times its parameters are sharded DTensors.
    """

    _vescale_runs = False  # RUNS, by its name: a guard of compiled code

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:  # type: ignore[misc]  # not of this class
        # Containers build slices of themselves with type(self)(...): those are plain modules.
        at = cls.__mro__.index(FSDPModule) + len(FSDPModule.__mro__) - 1  # what it was mixed into
        return cls.__mro__[at](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_gathered(self, super().__call__, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; a direct call gathers as calling the module does."""
        if self._vescale_runs:
            return super().forward(*args, **kwargs)
        return run_gathered(self, super().forward, args, kwargs)

    # --- gathering by hand ------------------------------------------------------------------

    def unshard(self, async_op: bool = False, *, recurse: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters, with ``recurse`` those of wrapped submodules too.

        With ``async_op`` the gather is only launched; ``wait()`` of the returned handle, or the
        next forward, completes it. ``reshard()`` or the next forward frees the memory.
        """
        check_bool("async_op", async_op)
        check_bool("recurse", recurse)
        unit_of(self)
        units = units_of(self, recurse)
        for unit in units:
            unit.prefetch()
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self, *, recurse: bool = False) -> None:
        """Free this module's full parameters and put the sharded ones in place.

        With ``recurse`` those of wrapped submodules too.
        """
        check_bool("recurse", recurse)
        unit_of(self)
        for unit in units_of(self, recurse):
            unit.reshard()
            unit.drop_kept()
            unit.drop_unclaimed()
            unit.settle()

    def reset_iter_state(self) -> None:
        """Recover after an exception in forward or backward: drop gradients not yet reduced, free
        full parameters, forget the iteration. Every rank must call it.

        It may be called on any wrapped module of a model and concerns all of them.
        """
        unit = unit_of(self)
        if unit.schedule is not None:
            unit.schedule.reset(drop_gradients=True)

    # --- what nn.Module does with parameters ------------------------------------------------

    @ordinary_tensors
    def __deepcopy__(self, memo: dict) -> nn.Module:
        """Return an independent copy, sharded alike; gradients not yet reduced are not copied."""
        return copy_wrapped(self, UNIT, memo)

    def __copy__(self) -> nn.Module:
        raise TypeError(
            f"{type(self).__name__} cannot be copied by copy.copy: two modules would share one set "
            "of parameters, of which each gathers its own. Use copy.deepcopy for an independent "
            "copy, or the module itself."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: its parameters live on several ranks. Save "
            "model.state_dict() with torch.distributed.checkpoint, and load it into a model that "
            "is built and wrapped anew."
        )

    @ordinary_tensors
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict with sharded parameters, as DTensors, without communication."""
        for unit in units_of(self, recurse=False):
            unit.put_back()
        return super().state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, also of sharded parameters while modules hold the full ones."""
        super().zero_grad(set_to_none)
        for unit in units_of(self, recurse=True):
            for group in unit.groups:
                group.zero_grad(set_to_none)

    @ordinary_tensors
    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        unit = unit_of(self)
        unit.put_back()
        if unit.schedule is not None:
            unit.schedule.turns.finish()
        for group in unit.groups:
            group.prepare_move()
        super()._apply(fn, recurse)
        for group in unit.groups:
            # Where a unit has several modules, the others may be moved next.
            if len(unit.modules) == 1 or group.moved_alike:
                group.adopt_moved()
        return self

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, local_metadata: dict, *args: Any
    ) -> None:
        unit = unit_of(self)
        unit.put_back()
        unit.settle()
        assign = local_metadata.get("assign_to_params_buffers", False)
        for group, index, names in _managed_names(self, unit):
            for name in names:
                key = prefix + name
                if isinstance(state_dict.get(key), torch.Tensor):
                    state_dict[key] = _loadable(group, index, state_dict[key], assign=assign)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def run_gathered(module: FSDPModule, inner: Callable, args: tuple, kwargs: dict) -> Any:
    """Call ``inner(*args, **kwargs)`` as a forward of ``module``: its parameters are gathered.

    torch.compile sees ``inner`` only; see ``fully_shard``.
    """
    if module._vescale_runs:  # a method of its own, or a module that calls itself
        return inner(*args, **kwargs)
    module.__dict__[RUNS] = True
    try:
        args, kwargs, watch = untraced(_enter)(module, args, kwargs)
        with watch:
            output = inner(*args, **kwargs)
        return untraced(_leave)(module, output)
    except BaseException:
        untraced(_abort)(module)
        raise
    finally:
        module.__dict__.pop(RUNS, None)


def _enter(
    module: FSDPModule, args: tuple, kwargs: dict
) -> tuple[tuple, dict, AbstractContextManager]:
    unit = unit_of(module)
    if unit.schedule is None:
        become_root(unit)
    return *unit.before_forward(module, args, kwargs), saved_tensor_watch()


def _leave(module: FSDPModule, output: Any) -> Any:
    return unit_of(module).after_forward(module, output)


def _abort(module: FSDPModule) -> None:
    schedule = unit_of(module).schedule
    if schedule is not None:
        schedule.abort_forward()


def become_root(root: Unit) -> None:
    """Put all units under the modules of ``root`` on one schedule."""
    schedule = Schedule()
    for module in root.modules:
        param_groups(module)  # names them
    units = {id(u): u for m in root.modules for u in units_of(m, recurse=True)}.values()
    warn_of_strangers(root.modules, units)
    for unit in units:
        if unit.manual_finalization and unit is not root:
            raise RuntimeError(
                "set_manual_backward_finalization was called on a module within the root; call it "
                "on the root: the module whose forward runs the others."
            )
    for unit in units:
        unit.join(schedule)
        unit.is_root = unit is root
        unit.within = [weakref.ref(u) for m in unit.modules for u in units_of(m, recurse=True)]


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


def _loadable(group: ParamGroup, index: int, value: Any, *, assign: bool) -> torch.Tensor:
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
