# SPDX-License-Identifier: Apache-2.0
"""The order of a step: what to gather ahead, and when to reduce.

One schedule serves all units under one root. It issues collectives in an order that every rank
derives alike from the order of the forwards, never from the data:

- ahead of a unit's forward, the gather of the unit that followed it last time;
- ahead of its backward, the gather of the unit that preceded it;
- instead of either, what the user chose for the unit;
- in the place of a unit that backward passes by, the same as if it had come there: on another rank
  it may have;
- reductions in the reverse of the order in which the units were first used, each when backward has
  come to the unit's inputs or to its end. A unit that is ready early waits for its turn, and one
  whose parameters had no gradient takes its turn with zeros.

A forward of the root and one of a unit by itself (an encoder, the head for each chunk of a loss)
have orders of their own, told apart by the *entry*: the unit that is called first. A backward
reduces the units of the entries that it reaches, used or not, and leaves those of others alone.

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
IN_BACKWARD = -1  # the entry of forwards that run in a backward, to recompute


class Schedule:
    """Order and progress of the units of one root. Holds them weakly, by index."""

    def __init__(self) -> None:
        self._units: list[weakref.ref[Unit]] = []
        self._depth = 0
        self._in_backward = False
        self._entry = 0
        self._forward_order: list[int] = []  # by start of forward, since the entry
        self._last_forward_orders: dict[int, list[int]] = {}  # of the forward before, by entry
        self._forward_cursor = 0
        # By end of forward, since the entry: (unit, how many had ended when it began).
        self._ended: list[tuple[int, int]] = []
        self._ended_orders: dict[int, list[tuple[int, int]]] = {}  # by entry, the newest last
        self._began: list[int] = []  # of the forwards that run, how many had ended
        self._backward_order: list[int | None] = []  # of all entries; None between two of them
        self._backward_began: list[int] = []  # the place of the first that ended after it began
        self._backward_cursor = 0
        self._reduce_order: list[int] = []  # by first start of forward, ever
        # By entry, the newest last: had a forward to differentiate since the last reduction.
        self._armed: dict[int, set[int]] = {}
        self._spent: dict[int, set[int]] = {}  # by entry: was armed, and has been reduced
        self._reached: set[int] = set()  # entries, by the backward that runs
        self._ready: set[int] = set()
        self._reducing: list[ParamGroup] = []  # over the ranks that shard
        self._replicating: list[ParamGroup] = []  # then over those that repeat
        # Whether the caller ends the backwards that ran since the last end; None: none ran.
        self.manual: bool | None = None
        self.awaited: object | None = None  # a handle that somebody has to wait for

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
                self._start_iteration(unit)
        self._depth += 1
        self._began.append(len(self._ended))
        if self.awaited is not None and not self._in_backward:
            raise RuntimeError(
                "a forward began before the gradients of finalize_backward(async_op=True) were "
                "waited for; call wait() of its handle first."
            )
        if not self._in_backward:
            self._forward_order.append(unit.index)
            if unit.index not in self._reduce_order:
                self._reduce_order.append(unit.index)

    def _start_iteration(self, entry: "Unit") -> None:
        for unit in self._live():
            unit.start_iteration(entry)
            if unit.post_optim_event is not None:
                unit.post_optim_event.wait()
                unit.post_optim_event = None
        if self._forward_order:
            self._last_forward_orders[self._entry] = self._forward_order
        self._entry = entry.index
        self._forward_order, self._ended = [], []
        self._forward_cursor = 0

    def arm(self, unit: "Unit") -> None:
        """Note that a forward of ``unit`` will be differentiated: it takes part in a reduction.

        So do the units whose parameters it borrows.
        """
        entry = IN_BACKWARD if self._in_backward else self._entry
        units = [unit]
        if unit.borrowed:
            units += [u for u in self._live() if any(g in unit.borrowed for g in u.groups)]
        indices = {each.index for each in units if each.trainable}
        if indices:
            self._armed[entry] = self._armed.pop(entry, set()) | indices

    def prefetch_forward(self, unit: "Unit") -> None:
        """Gather what the user chose, or the unit that followed ``unit`` in the last iteration."""
        if self._in_backward:
            return
        for ref in unit.forward_prefetch:
            self._prefetch(ref())
        order = self._last_forward_orders.get(self._entry, [])
        try:
            at = order.index(unit.index, self._forward_cursor)
        except ValueError:
            return  # another path than last time; a wrong guess would only cost
        self._forward_cursor = at + 1
        if at + 1 < len(order) and not unit.forward_prefetch:
            self._prefetch(self._unit(order[at + 1]))

    def leave_forward(self, unit: "Unit", *, differentiable: bool) -> None:
        """Note that ``unit`` ended its forward."""
        self._depth -= 1
        began = self._began.pop()
        if self._in_backward:
            return
        if differentiable:
            if not self._ended:
                self._ended_orders.pop(self._entry, None)
                self._ended_orders[self._entry] = self._ended
            if not self._ended or self._ended[-1][0] != unit.index:  # of several modules of one
                self._ended.append((unit.index, began))
        if self._depth == 0:
            for other in self._live():
                other.end_partly_run(unit)
                other.drop_unclaimed()

    def abort_forward(self) -> None:
        """Note that a forward raised; the outermost one leaves everything sharded."""
        self._depth -= 1
        self._began.pop()
        if self._depth == 0 and not self._in_backward:
            self.reset(drop_gradients=False)

    def _prefetch(self, unit: "Unit | None") -> None:
        if unit is not None and (unit.gathers_in_backward or not self._in_backward):
            unit.prefetch()

    # --- backward ---------------------------------------------------------------------------

    def enter_backward(self, unit: "Unit") -> None:
        """Note that backward reached ``unit``; the first call waits for the end of the pass."""
        if not self._in_backward:
            self._in_backward = True
            if self.manual is None:
                self.manual = any(unit.manual_finalization for unit in self._live())
            self._backward_order, self._backward_began = [], []
            for ended in self._ended_orders.values():
                first = len(self._backward_order) + 1
                self._backward_order += [None, *(index for index, _ in ended)]
                self._backward_began += [0, *(first + began for _, began in ended)]
            self._backward_cursor = len(self._backward_order)
            self._reached = {IN_BACKWARD}
            on_backward_end(self._leave_backward)
        for entry in reversed(self._armed):
            if unit.index in self._armed[entry]:
                self._reached.add(entry)
                return
        # A graph whose units an earlier backward reduced: of another forward, or once more.
        spent = [entry for entry, units in self._spent.items() if unit.index in units]
        if spent and self._reached.isdisjoint(spent):
            self._armed[spent[-1]] = self._armed.pop(spent[-1], set()) | self._spent[spent[-1]]
            self._reached.add(spent[-1])

    def catch_up(self, unit: "Unit") -> None:
        """Do what other ranks may do with the units that backward has passed by here."""
        at = self._place_in_backward(unit)
        if at is not None:
            self._pass_by(at)

    def prefetch_backward(self, unit: "Unit") -> None:
        """Gather what the user chose, or the unit that ended its forward just before ``unit``."""
        at = self._place_in_backward(unit)
        if at is not None:
            self._backward_cursor = at
        self._prefetch_before(unit, at)

    def _place_in_backward(self, unit: "Unit") -> int | None:
        order = self._backward_order
        places = range(self._backward_cursor - 1, -1, -1)
        return next((at for at in places if order[at] == unit.index), None)

    def _prefetch_before(self, unit: "Unit", at: int | None) -> None:
        for ref in unit.backward_prefetch:
            self._prefetch(ref())
        if at and self._backward_order[at - 1] is not None and not unit.backward_prefetch:
            self._prefetch(self._unit(self._backward_order[at - 1]))

    def _pass_by(self, end: int) -> None:
        """Pass by the units from the cursor down to that at ``end``, exclusive, of its entry."""
        order = self._backward_order
        stop = end + 1
        while stop < self._backward_cursor and order[stop] is not None:
            stop += 1
        first = end
        while order[first] is not None:
            first -= 1
        for at in range(stop - 1, end, -1):
            unit = self._unit(order[at])
            if unit is None or unit.in_backward:
                continue
            self._prefetch(unit)
            self._prefetch_before(unit, at)
            unit.drop_unclaimed()
            # Autograd goes from new to old: it is done with what began after ``end`` had ended.
            if self._backward_began[at] > end and order[at] not in order[first : end + 1]:
                unit.passed_by()
        self._backward_cursor = end + 1

    def _pass_by_the_rest(self) -> None:
        """Do so at the end of backward, as far as units are left that have to be reduced."""
        order = self._backward_order
        for index in reversed(order[self._backward_cursor :]):
            unit = self._unit(index) if index is not None else None
            if unit is not None and unit.trainable:
                self.ready(unit)
        begin = self._backward_cursor
        while begin > 0 and order[begin - 1] is not None:
            begin -= 1
        due = [at for at in range(begin, self._backward_cursor) if self._expects(order[at])]
        if due:
            self._pass_by(due[0] - 1)

    def ready(self, unit: "Unit") -> None:
        """Note that backward has passed ``unit``, and reduce what has its turn.

        A unit that lends a parameter has its turn at the end of the pass: the gradient is complete
        when all borrowers are done.
        """
        if unit.lends or not (self._expects(unit.index) or unit.has_gradients):
            return
        self._ready.add(unit.index)
        for index in reversed(self._reduce_order):
            if index in self._ready:
                self._reduce(index)
            elif self._expects(index) and not self._lends(index):
                return

    def _expects(self, index: int) -> bool:
        """Tell whether this backward must reduce the unit, with zeros if need be."""
        return any(index in self._armed.get(entry, ()) for entry in self._reached)

    def _lends(self, index: int) -> bool:
        unit = self._unit(index)
        return unit is not None and unit.lends

    def _reduce(self, index: int) -> None:
        for entry in self._reached:
            if index in self._armed.get(entry, ()):
                self._armed[entry].discard(index)
                if entry != IN_BACKWARD:
                    self._spent.setdefault(entry, set()).add(index)
        self._ready.discard(index)
        unit = self._unit(index)
        if unit is None:
            return
        for group in unit.groups:
            if group.trainable and not group.reduce_options.sync:
                group.put_off_reduce()
            elif group.trainable:
                self._start(group)

    def _start(self, group: "ParamGroup") -> None:
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
        self._pass_by_the_rest()
        self._in_backward = False
        for index in reversed(self._reduce_order):
            unit = self._unit(index)
            if self._expects(index) or (unit is not None and unit.has_gradients):
                self._reduce(index)
        for unit in self._live():  # an owner that never ran itself, only its borrowers
            if unit.has_gradients or self._expects(unit.index):
                self._reduce(unit.index)
        if not self.manual:
            self.manual = None
            if all(unit.is_last_backward for unit in self._live()):
                self.finish_reductions()
        waiting = set().union(*(a for e, a in self._armed.items() if e not in self._reached))
        self._ready.clear()
        self._reached.clear()
        for unit in self._live():
            unit.leave_backward(reshard=unit.index not in waiting)

    def reduce_now(self, units: "list[Unit]") -> None:
        """Reduce what waits in ``units`` outside of backward, and hand the results over.

        All of them that ever ran take part, whatever waits in them on this rank.
        """
        if self._in_backward or self._depth:
            raise RuntimeError(
                "gradients cannot be reduced by hand inside of a forward or backward; call "
                "reduce_gradients() after it, or reset_iter_state() if it raised."
            )
        self._start_all(units)
        self.finish_reductions()

    def _start_all(self, units: "list[Unit]", *, due: bool = False) -> None:
        """Start the reductions of ``units`` that ever ran, with ``due`` only of those that wait."""
        ran = [unit for unit in units if unit.index in self._reduce_order]
        ran.sort(key=lambda unit: -self._reduce_order.index(unit.index))
        for unit in [*ran, *(unit for unit in units if unit.lends and unit not in ran)]:
            for group in unit.groups:
                waits = group.has_gradients and group.reduce_options.sync
                if group.trainable and (waits or not due):
                    self._start(group)

    def finalize(self) -> None:
        """Start what backwards left to reduce, and shard what is sharded after a backward."""
        if self.awaited is not None:
            raise RuntimeError(
                "the gradients of the last finalize_backward(async_op=True) were not waited for; "
                "call wait() of its handle first."
            )
        if self._in_backward or self._depth or current_backward() != -1:
            raise RuntimeError(
                "finalize_backward() was called inside of a forward or backward; call it after, "
                "or reset_iter_state() if that raised."
            )
        units = self._live()
        self._start_all(units, due=True)
        for unit in units:
            unit.leave_backward(reshard=True)
        self.manual = None

    def finish_reductions(self) -> None:
        """Wait for the reductions under way and hand their results over."""
        while self._reducing:
            self._advance(self._reducing.pop(0))
        while self._replicating:
            self._replicating.pop(0).finish_reduce()
        for unit in self._live():
            unit.settle()

    def share_reductions(self, other: "Schedule") -> None:
        """Count reductions in flight together with those of ``other``, a root beside this one."""
        self.finish_reductions()
        self._reducing, self._replicating = other._reducing, other._replicating

    # --- recovery ---------------------------------------------------------------------------

    def reset(self, *, drop_gradients: bool) -> None:
        """Forget the iteration: wait for collectives under way and shard everything.

        ``drop_gradients`` also forgets gradients that were not reduced: some may be missing.
        """
        self._depth = 0
        self._began.clear()
        self._in_backward = False
        self._forward_order, self._ended = [], []
        self._ended_orders.clear()
        self._armed.clear()
        self._spent.clear()
        self._reached.clear()
        self._ready.clear()
        if drop_gradients:
            self.manual = self.awaited = None
        units = self._live()
        mine = {id(group) for unit in units for group in unit.groups}
        for under_way in (self._reducing, self._replicating):
            under_way[:] = [group for group in under_way if id(group) not in mine]
        for unit in units:
            unit.reset(drop_gradients=drop_gradients)
