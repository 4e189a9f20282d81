# SPDX-License-Identifier: Apache-2.0
"""The parameters of one unit that share dtype and mesh, through a step.

The gathered form of a managed parameter is a view of the full buffer, plain or torch's DTensor on
the parameter's own mesh; the module computes with it. See ``sharded_group`` for the sharded form.
"""

import enum
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from vescale.dtensor.tensor import local_of
from vescale.fsdp._torch_compat import call_untraced
from vescale.fsdp.agreement import agree
from vescale.fsdp.phases import HERE, waiting
from vescale.fsdp.ranges import profiled
from vescale.fsdp.saved_tensors import Watch
from vescale.fsdp.sharded_group import ShardedGroup


class State(enum.Enum):
    """Where a group's full parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class ParamGroup(ShardedGroup):
    """Gather and reduce the parameters of one group; each change checks the state."""

    def _clear(self) -> None:
        """Begin with nothing gathered, nothing reduced, and no memory."""
        super()._clear()
        self.state = State.SHARDED
        self.holders: set[int] = set()
        self._version = -1
        self._gathered_before = False
        self._watch: Watch | None = None
        self.second_order = False  # a backward that is differentiated itself has used it
        self._listener: weakref.WeakMethod | None = None
        self._taker: weakref.WeakMethod | None = None

    def _new_weights(self, home: torch.device, dtype: torch.dtype) -> None:
        self._watch = None
        super()._new_weights(home, dtype)

    def listen(self, on_use: Callable[[], None], on_gradient: Callable[[], None]) -> None:
        """Call these bound methods, held weakly, when backward needs the full parameters, and when
        it has a gradient of one."""
        self._listener = weakref.WeakMethod(on_use)
        self._taker = weakref.WeakMethod(on_gradient)

    def used_in_backward(self) -> None:
        """Tell the unit that backward needs a tensor that lies in the full buffer."""
        method = self._listener() if self._listener is not None else None
        if method is not None:
            method()

    # --- gather and free --------------------------------------------------------------------

    def _waiting(self, what: str) -> waiting:
        """Return the context of a collective of the unit, which names it if it fails."""
        return waiting(what, self.name, self.process_group)

    @property
    def stale(self) -> bool:
        """Whether full parameters were gathered before the sharded ones changed."""
        return self.state is not State.SHARDED and self._version != self._sharded_version()

    def _check_same_unit(self, what: str) -> None:
        """With TORCH_DISTRIBUTED_DEBUG=DETAIL, raise on every rank if they are at other units.

        Else units of one size would quietly get each other's data.
        """
        if dist.get_debug_level() == dist.DebugLevel.DETAIL and self.process_group is not None:
            description = f"{what} of unit {self.name or '(root)'}, {self.plan.numel} elements"
            agree(self.process_group, self.device, what, description)

    def drop_stale(self) -> None:
        """Free full parameters that are stale."""
        if self.stale:
            self._free()

    def gather(self) -> None:
        """Launch the gather of the full parameters; a no-op if it is under way or done."""
        if self.state is not State.SHARDED:
            return
        if any(local_of(item.sharded) is not item.local for item in self.managed):
            # A submodule was moved, cast or materialised by itself.
            self.prepare_move()
            self.adopt_moved()
        self._check_not_meta()
        self._check_same_unit("gather")
        version = self._sharded_version()
        changed = version != self._version
        modified, self._gathered_before = self._gathered_before and changed, True
        if changed:
            self.weights.drop_kept()
        self._version = version
        with (
            profiled("gather", self.name),
            self._waiting("gather of the parameters"),
        ):
            self.weights.all_gather(modified=modified)
            if self.second_order:
                # What a differentiated backward saved is used without notice: never half written.
                self.weights.wait_gather()
        if self._watch is None:
            self._watch = Watch(self.weights.full, self.used_in_backward)
        self._watch.start()
        self._enter(State.GATHERING)

    def _check_not_meta(self) -> None:
        if self.weights.device.type == "meta":
            raise RuntimeError(
                f"the unit {self.name or '(root)'!r} still has its parameters on the meta "
                "device; call init_empty(model) or load_full_state_dict(model, state) of "
                "vescale.fsdp, or model.to_empty(device=...) and then initialise them or load a "
                "checkpoint."
            )

    def wait(self, holder: int) -> None:
        """Make the full parameters usable by ``holder`` and put them into their modules."""
        self.gather()
        self.holders.add(holder)
        if self.state is State.GATHERING:
            with self._waiting("gather of the parameters"):
                self.weights.wait_gather()
            self._enter(State.GATHERED)
        if self.managed[0].gathered is None:
            self._make_gathered()
        self._put_gathered()

    def _enter(self, state: State) -> None:
        self.state = state
        if HERE.listener is not None:
            HERE.listener.moved(self)

    def _put_gathered(self) -> None:
        for item in self.managed:
            item.check_registered()
            if item.gathered.requires_grad != item.sharded.requires_grad:
                item.gathered.requires_grad_(item.sharded.requires_grad)
            item.register(item.gathered)

    def release(self, holder: int, *, keep: bool = False) -> None:
        """Give the full parameters up for ``holder``; the last one frees their memory.

        ``keep`` then leaves a copy of them cut over ``keep_over`` neighbours only, if that is set,
        for the next gather.
        """
        self.holders.discard(holder)
        if not self.holders:
            self._free(keep)

    def put_back(self) -> None:
        """Give the full parameters up for all holders, and so put the sharded ones in place."""
        self.holders.clear()
        self._free()

    def _free(self, keep: bool = False) -> None:
        if self.state is State.SHARDED:
            return
        self.weights.wait_gather()
        self._watch.stop()
        # What a differentiated backward saves it saves outside of every forward: nobody could
        # bring it back, so the memory stays until that graph is gone.
        known = len(self.managed) + self._watch.views
        held = self.second_order and self.weights.full_views() > known
        if keep and self.keep_over is not None and self.weights.full.numel():
            self.weights.keep(self.data.subgroup(self.keep_over))
        if not held:
            self.second_order = False
            if not self.keep_storage:
                self._free_storage()
        self._enter(State.SHARDED)
        for item in self.managed:
            item.put_back()

    def set_keep_storage(self, keep: bool) -> None:
        """Choose whether full parameters keep their memory while they are not gathered."""
        self.keep_storage = keep
        if not keep and self.state is State.SHARDED and not self.second_order:
            self._free_storage()

    def _free_storage(self) -> None:
        self.weights.free_full()

    def _make_gathered(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for index, item in enumerate(self.managed):
                gathered = item.make_gathered(self.weights.view(index))
                if gathered.is_floating_point() or gathered.is_complex():
                    requires_grad = gathered.requires_grad
                    gathered.requires_grad_(True)  # a hook needs it; set back below
                    gathered.register_post_accumulate_grad_hook(Taker(self, index))
                    gathered.requires_grad_(requires_grad)

    def _sharded_version(self) -> int:
        # The shard's own also counts what is written past the parameters, through ``.data``.
        return self.weights.shard._version + sum(item.sharded._version for item in self.managed)

    # --- gradients --------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether a reduction now would bring gradients on."""
        return self.reduction.due

    def take_gradient(self, index: int) -> None:
        """Move the gradient that autograd just left on a gathered parameter into the buffer."""
        method = self._taker() if self._taker is not None else None
        if method is not None:
            method()
        self.reduction.take(index, self.managed[index].take_gradient())

    def put_off_reduce(self) -> None:
        """Note that a backward ended without the reduction of the group's gradients."""
        self.reduction.put_off()

    def start_reduce(self) -> None:
        """Launch the reduction of the group's gradients."""
        if HERE.listener is not None:
            HERE.listener.reduces(self, begins=True)
        with (
            profiled("reduce", self.name),
            self._waiting("reduction of the gradients"),
        ):
            self._check_same_unit("reduce")
            self.reduction.start()

    def collect_reduce(self) -> None:
        """Wait for the first collective of the reduction under way, and free its buffer."""
        with self._waiting("reduction of the gradients"):
            self.reduction.collect()

    def advance_reduce(self) -> bool:
        """Launch the second collective of the reduction under way, if it has one.

        Returns whether ``finish_reduce`` has something to do.
        """
        with self._waiting("reduction of the gradients"):
            goes_on = self.reduction.advance()
        if not goes_on and HERE.listener is not None:
            HERE.listener.reduces(self, begins=False)
        return goes_on

    def finish_reduce(self) -> None:
        """Put the result of the reduction under way, if any, into the sharded ``.grad``."""
        with self._waiting("reduction of the gradients"):
            self.reduction.finish()
        if HERE.listener is not None:
            HERE.listener.reduces(self, begins=False)

    def settle(self) -> None:
        """Wait for copies between host and device: then gradients are there, and shards may be
        written. Does nothing without offloading."""
        copies = self.weights.copies
        if copies is not None:
            self.weights.settle()
            self.reduction.settle()
            copies.settle()

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset the sharded gradients, whichever form the modules hold now."""
        for item in self.managed:
            grad = item.sharded.grad
            if grad is None:
                continue
            if set_to_none:
                item.sharded.grad = None
            else:
                grad.detach_().zero_()

    def reset(self, *, drop_gradients: bool) -> None:
        """Return to the state before a forward: nothing under way, nothing gathered.

        ``drop_gradients`` also forgets the gradients that wait for a reduction.
        """
        if drop_gradients:
            self.reduction.drop()
        self.finish_reduce()
        self.settle()
        self.put_back()
        self.weights.drop_kept()
        for item in self.managed:
            if item.gathered is not None:
                item.gathered.grad = None


class Taker:
    """Hook of a gathered parameter: hands its gradient to the group, which it does not own."""

    def __init__(self, group: ParamGroup, index: int) -> None:
        self._group, self._index = weakref.ref(group), index

    def __call__(self, param: nn.Parameter) -> None:
        group = self._group()
        if group is not None:
            call_untraced(group.take_gradient, self._index)


HOOKS = (Taker.__call__,)  # what autograd calls: nothing to compile
