# SPDX-License-Identifier: Apache-2.0
"""The order of a step: what to gather ahead, and when to reduce.

One schedule serves all units under one root. It issues collectives in an order that every rank
derives alike from the order of the forwards, never from the data:

- ahead of a unit's forward, the gather of the unit that followed it last time;
- ahead of its backward, the gather of the unit that preceded it;
- reductions in the reverse of the order in which the units were first used, each when backward has
  come to the unit's inputs or to its end. A unit that is ready early waits for its turn, and one
  whose parameters had no gradient takes its turn with zeros.

Where there are streams, a collective runs on its process group's stream between two points of the
current stream: it starts after the work issued so far and is waited for where its result is used.
All buffers are allocated and freed on the current stream, so no buffer changes its owner.
"""

import weakref
from typing import TYPE_CHECKING

from vescale.fsdp._torch_compat import current_backward, on_backward_end

if TYPE_CHECKING:
    from vescale.fsdp.param_group import ParamGroup
    from vescale.fsdp.unit import Unit

ALL_REDUCES_IN_FLIGHT = 1


class Schedule:
    """Order and progress of the units of one root. Holds them weakly, by index."""

    def __init__(self) -> None:
        self._units: list[weakref.ref[Unit]] = []
        self._depth = 0
        self._in_backward = False
        self._forward_order: list[int] = []  # by start of forward, in the running iteration
        self._last_forward_order: list[int] = []  # and in the one before
        self._forward_cursor = 0
        self._backward_order: list[int] = []  # by end of forward
        self._backward_cursor = 0
        self._reduce_order: list[int] = []  # by first start of forward, ever
        self._armed: set[int] = set()  # had a forward to differentiate since the last reduction
        self._ready: set[int] = set()
        self._reducing: list[ParamGroup] = []  # over the ranks that shard
        self._replicating: list[ParamGroup] = []  # then over those that repeat

    def add(self, unit: "Unit") -> int:
        """Take ``unit`` in and return its index."""
        self._units.append(weakref.ref(unit))
        return len(self._units) - 1

    def _unit(self, index: int) -> "Unit | None":
        return self._units[index]()

    def _live(self) -> "list[Unit]":
        return [unit for ref in self._units if (unit := ref()) is not None]

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass over these units runs now."""
        return self._in_backward

    # --- forward ----------------------------------------------------------------------------

    def enter_forward(self, unit: "Unit") -> None:
        """Note that ``unit`` starts a forward."""
        if self._depth == 0:
            if self._in_backward and current_backward() == -1:
                self.reset(drop_gradients=True)  # the last backward raised and never ended
            if not self._in_backward:
                self._start_iteration()
        self._depth += 1
        if not self._in_backward:
            self._forward_order.append(unit.index)
            if unit.index not in self._reduce_order:
                self._reduce_order.append(unit.index)

    def _start_iteration(self) -> None:
        for unit in self._live():
            # Also a root that was kept for a backward: an optimizer may have stepped since.
            if unit.kept_by_default:
                unit.reshard()
            unit.drop_kept()
        if self._forward_order:
            self._last_forward_order = self._forward_order
        self._forward_order, self._backward_order = [], []
        self._forward_cursor = 0

    def arm(self, unit: "Unit") -> None:
        """Note that a forward of ``unit`` will be differentiated: it takes part in a reduction."""
        self._armed.add(unit.index)

    def prefetch_forward(self, unit: "Unit") -> None:
        """Gather the unit that followed ``unit`` in the last iteration."""
        if self._in_backward:
            return
        order = self._last_forward_order
        try:
            at = order.index(unit.index, self._forward_cursor)
        except ValueError:
            return  # another path than last time; a wrong guess would only cost
        self._forward_cursor = at + 1
        if at + 1 < len(order):
            self._prefetch(order[at + 1])

    def leave_forward(self, unit: "Unit", *, differentiable: bool) -> None:
        """Note that ``unit`` ended its forward."""
        self._depth -= 1
        if not self._in_backward and differentiable:
            self._backward_order.append(unit.index)
            self._backward_cursor = len(self._backward_order)
        if self._depth == 0 and not self._in_backward:
            self._drop_unclaimed()

    def abort_forward(self) -> None:
        """Note that a forward raised; the outermost one leaves everything sharded."""
        self._depth -= 1
        if self._depth == 0 and not self._in_backward:
            self.reset(drop_gradients=False)

    def _prefetch(self, index: int) -> None:
        unit = self._unit(index)
        if unit is not None:
            unit.prefetch()

    def _drop_unclaimed(self) -> None:
        for unit in self._live():
            unit.drop_unclaimed()

    # --- backward ---------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """Note that backward reached a unit; the first call waits for the end of the pass."""
        if not self._in_backward:
            self._in_backward = True
            self._backward_cursor = len(self._backward_order)
            on_backward_end(self._leave_backward)

    def prefetch_backward(self, unit: "Unit") -> None:
        """Gather the unit that ended its forward just before ``unit`` did."""
        order = self._backward_order
        for at in range(self._backward_cursor - 1, -1, -1):
            if order[at] == unit.index:
                self._backward_cursor = at
                if at:
                    self._prefetch(order[at - 1])
                return

    def ready(self, unit: "Unit") -> None:
        """Note that backward has passed ``unit``, and reduce what has its turn.

        A unit that lends a parameter has its turn at the end of the pass: the gradient is complete
        when all borrowers are done.
        """
        if unit.lends or (unit.index not in self._armed and not unit.has_gradients):
            return
        self._ready.add(unit.index)
        self._armed.add(unit.index)
        for index in reversed(self._reduce_order):
            if index in self._ready:
                self._reduce(index)
            elif index in self._armed and not self._lends(index):
                return

    def _lends(self, index: int) -> bool:
        unit = self._unit(index)
        return unit is not None and unit.lends

    def _reduce(self, index: int) -> None:
        self._armed.discard(index)
        self._ready.discard(index)
        unit = self._unit(index)
        if unit is None:
            return
        for group in unit.groups:
            if group.trainable and group.reduce_options.sync:
                while len(self._reducing) >= group.reduce_options.in_flight:
                    self._advance(self._reducing.pop(0))
                group.start_reduce()
                self._reducing.append(group)

    def _advance(self, group: "ParamGroup") -> None:
        """Let the all-reduce of ``group`` run while the next group is reduced."""
        if group.advance_reduce():
            self._replicating.append(group)
            while len(self._replicating) > ALL_REDUCES_IN_FLIGHT:
                self._replicating.pop(0).finish_reduce()

    def _leave_backward(self) -> None:
        self._in_backward = False
        for index in reversed(self._reduce_order):
            unit = self._unit(index)
            if index in self._armed or (unit is not None and unit.has_gradients):
                self._reduce(index)
        for unit in self._live():  # an owner that never ran itself, only its borrowers
            if unit.has_gradients:
                self._reduce(unit.index)
        for group in self._reducing:
            self._advance(group)
        for group in self._replicating:
            group.finish_reduce()
        self._reducing.clear()
        self._replicating.clear()
        self._ready.clear()
        for unit in self._live():
            unit.leave_backward()

    # --- recovery ---------------------------------------------------------------------------

    def reset(self, *, drop_gradients: bool) -> None:
        """Forget the iteration: wait for collectives under way and shard everything.

        ``drop_gradients`` also forgets gradients that were not reduced: some may be missing.
        """
        self._depth = 0
        self._in_backward = False
        self._forward_order, self._backward_order = [], []
        self._armed.clear()
        self._ready.clear()
        self._reducing.clear()
        self._replicating.clear()
        for unit in self._live():
            unit.reset(drop_gradients=drop_gradients)
