# SPDX-License-Identifier: Apache-2.0
"""The modules of one ``fully_shard``: their parameter groups, and where they stand in the step."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vescale.fsdp._torch_compat import call_untraced, current_backward, will_execute
from vescale.fsdp.forward_record import ForwardRecord
from vescale.fsdp.param_group import ParamGroup, State
from vescale.fsdp.phases import HERE
from vescale.fsdp.policy import MixedPrecisionPolicy
from vescale.fsdp.saved_tensors import others_watch, watched_by
from vescale.fsdp.schedule import Schedule
from vescale.fsdp.structure import cast_floating, map_tensors, tensors_in

RUNS = "_vescale_runs"  # in the __dict__ of a module that runs now


class _Call:
    """A forward whose inputs wait for their gradients; gone when its graph is."""

    def __init__(self, unit: "Unit", inputs: list[torch.Tensor]) -> None:
        self._unit = weakref.ref(unit)
        # Nodes hold hooks that hold this: no such cycle for one input, and a short one for more.
        self._nodes = [tensor.grad_fn for tensor in inputs] if len(inputs) > 1 else None
        self._missing = 0
        self.at: tuple[ForwardRecord, int] | None = None  # its place for backward, if it has one
        for tensor in inputs:
            tensor.register_hook(self._hook)

    def _hook(self, _: torch.Tensor) -> None:
        call_untraced(self._arrived)

    def _arrived(self) -> None:
        if self._nodes is not None:
            if not self._missing:
                self._missing = sum(map(will_execute, self._nodes))
            self._missing -= 1
            if self._missing:
                return
            self._nodes = None
        unit = self._unit()
        if unit is not None:
            unit.inputs_done(self)


class Unit:
    """Gather before use, free after it, and say when backward is done.

    A unit has one module, or several: then the first that runs gathers, and the parameters are
    freed when all have run, or at the end of the outermost forward around them.

    ``groups`` are the unit's own; ``borrowed`` ones belong to another unit, which owns a parameter
    tied to one of this unit's modules.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[ParamGroup],
        borrowed: list[ParamGroup],
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self.groups, self.borrowed, self.policy = groups, borrowed, policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self._unwatched = False  # whether a forward ran where others watch what is saved
        self.is_last_backward = True
        self.manual_finalization = False  # whether the caller ends backwards; of a root
        self.post_optim_event: torch.Event | None = None
        self.forward_prefetch: list[weakref.ref[Unit]] = []
        self.backward_prefetch: list[weakref.ref[Unit]] = []
        self.ignored: list[weakref.ref[nn.Parameter]] = []  # that fully_shard was told to leave
        self.schedule: Schedule | None = None
        self.index = -1
        self.is_root = False
        self._ran: set[int] = set()  # modules that ended, while others are still to come
        self.in_backward = False
        self.kept_by_default = False  # gathered still, by a forward and nobody's wish
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._begun: dict[int, _Call] = {}  # of modules that run now, by id
        self.within: list[weakref.ref[Unit]] = []  # the units of the modules under it, and itself
        for group in groups:
            group.listen(self.needed_in_backward, self.gradient_arrived)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are left, in the order of the call of ``fully_shard``."""
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def name(self) -> str:
        """The FQN of the unit's module, or of its modules; "" for the root."""
        if self.groups:
            return self.groups[0].name
        return "" if self.is_root else "(without parameters)"

    @property
    def all_groups(self) -> list[ParamGroup]:
        """The groups that the module computes with."""
        return self.groups + self.borrowed

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of the unit's own groups wait for a reduction."""
        return any(group.has_gradients for group in self.groups)

    @property
    def lean(self) -> bool:
        """Whether collectives use the cores that compute: overlap then costs more than it gives."""
        return any(group.device.type == "cpu" for group in self.groups)

    @property
    def gathers_in_backward(self) -> bool:
        """Whether backward gathers ahead of a use: as the user chose, unless no use is noticed."""
        return self.unshard_in_backward or self._unwatched

    @property
    def trainable(self) -> bool:
        """Whether any of the unit's own parameters requires a gradient."""
        return any(group.trainable for group in self.groups)

    @property
    def replicated(self) -> bool:
        """Whether gradients of the unit are reduced over replicas, of which each has other data."""
        return any(group.trainable and group.data.replicas > 1 for group in self.groups)

    @property
    def lends(self) -> bool:
        """Whether modules of other units use a parameter of this one."""
        return any(group.lent for group in self.groups)

    def join(self, schedule: Schedule) -> None:
        """Take part in ``schedule`` from now on."""
        if self.schedule is not None:
            self.schedule.turns.finish()
        self.schedule = schedule
        self.index = schedule.add(self)

    # --- gather and free --------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the full parameters and put them into the modules."""
        groups = self.all_groups
        self._let_postponed_pass(groups)
        for group in groups:
            group.gather()
        for group in groups:
            group.wait(id(self))

    def prefetch(self) -> None:
        """Launch the gather; somebody will wait for it."""
        groups = self.all_groups
        self._let_postponed_pass(groups)
        for group in groups:
            group.gather()

    def _let_postponed_pass(self, groups: list[ParamGroup]) -> None:
        if self.schedule is not None and any(group.state is State.SHARDED for group in groups):
            self.schedule.launch_postponed()

    def reshard(self, *, keep: bool = False) -> None:
        """Give the full parameters up; their memory goes with the last unit that uses them.

        ``keep`` leaves a copy of the unit's own ones, cut over fewer ranks.
        """
        self.kept_by_default = False
        for group in self.groups:
            group.release(id(self), keep=keep)
        for group in self.borrowed:
            group.release(id(self))

    def put_back(self) -> None:
        """Put the sharded parameters in place, also those that another unit's modules use."""
        self.kept_by_default = False
        for group in self.all_groups:
            group.put_back()

    def settle(self) -> None:
        """Wait for copies between host and device, where the unit is offloaded."""
        for group in self.all_groups:
            group.settle()

    def start_iteration(self, entry: "Unit") -> None:
        """Prepare for a forward that starts with ``entry``."""
        if self is not entry:
            self._ran.clear()
        # Of a root that was kept for its backward, an optimizer may have stepped since.
        if self.kept_by_default and any(group.stale for group in self.groups):
            self.reshard()
        self.drop_kept()

    def drop_kept(self) -> None:
        """Forget what ``reshard`` kept."""
        for group in self.groups:
            group.weights.drop_kept()

    def drop_unclaimed(self) -> None:
        """Free what was gathered ahead in vain."""
        for group in self.groups:
            if not group.holders:
                group.release(id(self))

    # --- forward ----------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gather, look ahead, and return the inputs of ``module``, cast as the policy says."""
        self.schedule.enter_forward(self)
        if self.schedule.in_backward:
            self.schedule.run_again(self)
        else:
            for group in self.all_groups:
                group.drop_stale()
        self.unshard()
        self.schedule.prefetch_forward(self)
        HERE.at("forward", self.name)
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args = cast_floating(self.policy.param_dtype, args)
            kwargs = cast_floating(self.policy.param_dtype, kwargs)
        if torch.is_grad_enabled() and others_watch():
            self._unwatched = True
        if self._differentiable:
            self.schedule.arm(self)
            return self._watch_inputs(module, args, kwargs)
        return args, kwargs

    def after_forward(self, module: nn.Module, output: Any) -> Any:
        """Free the full parameters, unless they are kept, and return the output, cast."""
        if any(watched_by(tensor) in self.all_groups for tensor in tensors_in(output)):
            output = map_tensors(self._outliving, output)
        if self.policy.output_dtype is not None:
            output = cast_floating(self.policy.output_dtype, output)
        call = self._begun.pop(id(module), None)
        if self._differentiable:
            leads = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            at = self.schedule.end_forward(self, hooked=bool(leads))
            for tensor in leads:
                tensor.register_hook(_Reached(self, at))
            if call is not None:
                call.at = at
        else:
            self.schedule.end_to_run_again(self)
            self.settle()
        if not self.in_backward:
            self._ran.add(id(module))
            if len(self._ran) == len(self._modules):
                self._end_forward()
        self.schedule.leave_forward(self)
        HERE.at("code after the forward", self.name)
        return output

    def _end_forward(self) -> None:
        self._ran.clear()
        if self._reshards_after_forward:
            self.reshard(keep=not isinstance(self.reshard_after_forward, bool | None))
        else:
            self.kept_by_default = self.reshard_after_forward is None

    def end_partly_run(self, outermost: "Unit") -> None:
        """Note that the outermost forward ended: modules that did not run will not, for now.

        A unit that was called by itself, as for each chunk of a loss, stays gathered: more such
        calls or its backward follow.
        """
        if self._ran and not self.in_backward:
            if self is outermost:
                self.kept_by_default = self.reshard_after_forward is not False
            else:
                self._end_forward()

    def _outliving(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a full parameter that forward returned; else the tensor itself."""
        return tensor.clone() if watched_by(tensor) in self.all_groups else tensor

    @property
    def _differentiable(self) -> bool:
        # A recomputation by checkpointing is not: its graph serves the tensors it saves.
        recomputes = self.schedule.in_backward and others_watch()
        return torch.is_grad_enabled() and not recomputes

    @property
    def _reshards_after_forward(self) -> bool:
        if self.reshard_after_forward is not None:
            return bool(self.reshard_after_forward)
        # The root is used first in backward, so by default it stays; without a backward an
        # optimizer could step meanwhile.
        return not (self.is_root and torch.is_grad_enabled())

    def _watch_inputs(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the inputs with those that need a gradient replaced by views of themselves.

        A view's gradient is complete when this call's part of backward is, while the input's own
        also waits for whoever else uses it. Unlike a custom autograd function, a view may be
        written in place.
        """
        views: list[torch.Tensor] = []

        def view(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            views.append(tensor.view_as(tensor))
            return views[-1]

        args, kwargs = map_tensors(view, (args, kwargs))
        if views:
            self._begun[id(module)] = call = _Call(self, views)
            self._calls.add(call)
        return args, kwargs

    # --- backward ---------------------------------------------------------------------------

    def before_backward(self, at: tuple[ForwardRecord, int] | None) -> None:
        """Have the full parameters in place: backward reached the unit, at the place ``at``."""
        self._enter_backward(gather=self.gathers_in_backward, in_order=True, at=at)

    def needed_in_backward(self) -> None:
        """Have the full parameters in place, also where the user said that none is needed."""
        # A borrower may need the lender's parameters long before the lender's turn.
        self._enter_backward(gather=True, in_order=not self.lends)

    def _enter_backward(
        self, *, gather: bool, in_order: bool, at: tuple[ForwardRecord, int] | None = None
    ) -> None:
        groups = self.all_groups
        there = all(group.state is State.GATHERED for group in groups)
        if torch.is_grad_enabled():
            for group in groups:
                group.second_order = True
        new = at is not None and at[0].is_ahead(at[1])
        if self.in_backward and (there or not gather) and not new:
            return
        if current_backward() == -1:  # somebody looks into the graph
            self.unshard()
            return
        self.in_backward = True
        self.schedule.enter_backward(self, at[0] if at is not None else None)
        if at is None and in_order:
            at = self.schedule.place(self)
        new = at is not None and at[0].is_ahead(at[1])
        if new:
            self.schedule.catch_up(*at)
        if gather:
            self.unshard()
        if new:
            self.schedule.prefetch_backward(self, *at)
        HERE.at("backward", self.name)

    def pass_by(self) -> None:
        """Do as other ranks do: backward came past the unit here, and comes to it on theirs."""
        if self.gathers_in_backward:
            self.in_backward = True
            self.unshard()

    def pass_by_forward(self) -> None:
        """Do as other ranks do, which run a forward of the unit again in backward."""
        if not self.in_backward:
            self.unshard()
            self._end_forward()

    def gradient_arrived(self) -> None:
        """Have the pass's end noticed, also where nothing that a forward saved leads here."""
        if self.schedule is None:
            return
        if not self.in_backward and current_backward() != -1:
            self.schedule.enter_backward(self)
        if self.lean:
            self.schedule.turns.make_room(self.groups[0].reduce_options.in_flight - 1)

    def inputs_done(self, call: _Call) -> None:
        """Note that the inputs of ``call`` have their gradients."""
        self._calls.discard(call)
        if not self.in_backward or any(other.at == call.at for other in self._calls):
            return
        if call.at is not None:
            self.schedule.finish(*call.at)
        elif not self.schedule.awaits(self):
            self.leave_early()

    def leave_early(self) -> None:
        """Note that backward is done with the unit, before its end."""
        if self.reshard_after_backward:
            self.reshard()
            self.in_backward = False
        if self.trainable:
            self.schedule.turns.ready(self)

    def leave_backward(self, *, reshard: bool) -> None:
        """Note that the pass has ended; ``reshard`` unless a backward of the unit is to come."""
        self.in_backward = False
        self.settle()
        self._ran.clear()
        if self.reshard_after_backward:
            if reshard:
                self.reshard()
            self.drop_unclaimed()

    def reset(self, *, drop_gradients: bool) -> None:
        """Return to the state before a forward."""
        self.in_backward = self.kept_by_default = False
        for module in self.modules:
            module.__dict__.pop(RUNS, None)
        self._ran.clear()
        self._calls.clear()
        self._begun.clear()
        for group in self.groups:
            group.reset(drop_gradients=drop_gradients)


class _Reached:
    """A hook of an output: backward has come to the unit. Keeps the record alive, not the unit."""

    def __init__(self, unit: Unit, at: tuple[ForwardRecord, int] | None) -> None:
        self._unit, self._at = weakref.ref(unit), at

    def __call__(self, _: torch.Tensor) -> None:
        unit = self._unit()
        if unit is not None:
            call_untraced(unit.before_backward, self._at)


HOOKS = (_Call._hook, _Reached.__call__)  # what autograd calls: nothing to compile
