# SPDX-License-Identifier: Apache-2.0
"""The order of a step: what to gather ahead, and when to reduce.

One schedule serves all units under one root. It issues collectives in an order that every rank
derives alike from the order of the forwards, never from the data:

- ahead of a unit's forward, the gather of the unit that followed it last time;
- ahead of its backward, the gather of the unit that preceded it;
- instead of either, what the user chose for the unit;
- in the place of a unit that backward passes by, the same as if it had come there: on another rank
  it may have;
- reductions in turns of their own (see ``reduce_turns``), each when backward can come to the unit
  no more.

A forward of the root and one of a unit by itself (an encoder, the head for each chunk of a loss)
have orders of their own, told apart by the *entry*: the unit that is called first. Each outermost
forward leaves a record, which its graph keeps alive. A backward walks the records that it comes to,
one after the other, and reduces their units, used or not.

A unit that no rank used is gathered too. What a rank used is known to its own graph alone, and a
flag that travels with a reduction would have to be waited for before the next gather.

Where there are streams, a collective runs on its process group's stream between two points of the
current stream: it starts after the work issued so far and is waited for where its result is used.
All buffers are allocated and freed on the current stream, so no buffer changes its owner.

On CPU, ranks gather and reduce with the cores that compute, so there is little to win by doing it
beside them, and memory to lose: backward puts a gather ahead off until the next collective is due,
which is when the unit before is freed, and waits for reductions where it would need another buffer
for gradients. The order of collectives stays the same.
"""

import weakref
from typing import TYPE_CHECKING

import torch

from vescale.fsdp._torch_compat import (
    current_backward,
    on_backward_end,
    reentrant_checkpoint,
)
from vescale.fsdp.forward_record import ForwardRecord
from vescale.fsdp.phases import HERE
from vescale.fsdp.reduce_turns import ReduceTurns
from vescale.fsdp.unit_list import UnitList

if TYPE_CHECKING:
    from vescale.fsdp.unit import Unit


class Schedule:
    """Order and progress of the units of one root. Holds them weakly, by index."""

    def __init__(self) -> None:
        self._units = UnitList()
        self.turns = ReduceTurns(self._units, self.launch_postponed)
        self._depth = 0
        self._in_backward = False
        self._entry = 0
        self._forward_order: list[int] = []  # by start of forward, since the entry
        self._last_forward_orders: dict[int, list[int]] = {}  # of the forward before, by entry
        self._forward_cursor = 0
        self._began: list[int] = []  # of the forwards that run, how many units had ended
        self._record: ForwardRecord | None = None  # of the outermost forward that runs
        self._differentiable = False  # whether that began with gradients on
        self._frame: object | None = None  # of the reentrant checkpointing that runs
        self._region: object | None = None  # what stands for it in the record
        self._records: list[weakref.ref[ForwardRecord]] = []  # the newest last; graphs hold them
        self._hidden: dict[int, ForwardRecord] = {}  # that no tensor leads to, by entry
        self._walked: list[ForwardRecord] = []  # by the backward that runs, the newest last
        self._postponed: weakref.ref[Unit] | None = None  # gathered before the next collective
        # Whether the caller ends the backwards that ran since the last end; None: none ran.
        self.manual: bool | None = None
        self.awaited: object | None = None  # a handle that somebody has to wait for

    def add(self, unit: "Unit") -> int:
        """Take ``unit`` in and return its index."""
        return self._units.add(unit)

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
        self._began.append(len(self._record.units) if self._record is not None else 0)
        if self.awaited is not None and not self._in_backward:
            raise RuntimeError(
                "a forward began before the gradients of finalize_backward(async_op=True) were "
                "waited for; call wait() of its handle first."
            )
        if not self._in_backward:
            self._forward_order.append(unit.index)
            self.turns.note(unit)

    def _start_iteration(self, entry: "Unit") -> None:
        HERE.forwards += 1
        for unit in self._units.live():
            unit.start_iteration(entry)
            if unit.post_optim_event is not None:
                unit.post_optim_event.wait()
                unit.post_optim_event = None
        if self._forward_order:
            self._last_forward_orders[self._entry] = self._forward_order
        self._entry = entry.index
        self._forward_order = []
        self._forward_cursor = 0
        self._differentiable = torch.is_grad_enabled()
        self._record = ForwardRecord(entry.index, self._replicated(entry))
        self._records.append(weakref.ref(self._record))

    def _replicated(self, entry: "Unit") -> frozenset[int]:
        if not torch.is_grad_enabled():
            return frozenset()
        return frozenset(unit.index for ref in entry.within if (unit := ref()) and unit.replicated)

    def arm(self, unit: "Unit") -> None:
        """Note that a forward of ``unit`` will be differentiated: it takes part in a reduction.

        So do the units whose parameters it borrows.
        """
        units = [unit]
        if unit.borrowed:
            units += [u for u in self._units.live() if any(g in unit.borrowed for g in u.groups)]
        indices = {each.index for each in units if each.trainable}
        if self._in_backward:
            self.turns.expected |= indices
        else:
            self._record.armed |= indices

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
            self._prefetch(self._units.at(order[at + 1]))

    def end_forward(self, unit: "Unit", *, hooked: bool) -> tuple[ForwardRecord, int] | None:
        """Return the place that backward will come to, of the forward of ``unit`` that ends.

        ``hooked``: whether an output of it leads there. In a backward, which recomputes, None if
        it is not known what.
        """
        if self._in_backward:
            record = self._walked[-1] if self._walked else None
            at = record.place_again(unit.index) if record is not None else None
            return None if at is None else (record, at)
        record = self._record
        record.hooked |= hooked and unit.index == record.entry
        needed = hooked or unit.trainable
        return record, record.add(unit.index, self._began[-1], needed=needed)

    def end_to_run_again(self, unit: "Unit") -> None:
        """Note the place of ``unit`` if backward will run its forward again, and differentiate it.

        So does reentrant checkpointing. All of its ranks have to know, whether they use it or not.
        """
        if self._in_backward or not self._differentiable:
            return
        region = reentrant_checkpoint()
        if region is None:
            self._region = None
            return
        if region is not self._frame:
            self._frame, self._region = region, object()
        self.arm(unit)
        self._record.add(unit.index, self._began[-1], needed=unit.trainable, region=self._region)

    def run_again(self, unit: "Unit") -> None:
        """Do what other ranks may do before backward runs the forward of ``unit`` again."""
        record = self._walked[-1] if self._walked else None
        at = record.next_place(unit.index) if record is not None else None
        again = record.rerun(at) if at is not None else ()
        if again:
            self.catch_up(record, again[-1])
            record.cursor = again[-1] + 1  # its backward is to come

    def leave_forward(self, unit: "Unit") -> None:
        """Note that ``unit`` ended its forward."""
        self._depth -= 1
        self._began.pop()
        if self._in_backward or self._depth:
            return
        self._frame = None
        record, self._record = self._record, None
        self._hidden.pop(record.entry, None)
        if record.units and not record.hooked:
            self._hidden[record.entry] = record
        for other in self._units.live():
            other.end_partly_run(unit)
            other.drop_unclaimed()

    def abort_forward(self) -> None:
        """Note that a forward raised; the outermost one leaves everything sharded."""
        self._depth -= 1
        self._began.pop()
        if self._depth == 0 and not self._in_backward:
            self.reset(drop_gradients=False)
            HERE.at("code after a forward that raised")

    def _prefetch(self, unit: "Unit | None") -> None:
        if unit is not None and (unit.gathers_in_backward or not self._in_backward):
            unit.prefetch()

    # --- backward ---------------------------------------------------------------------------

    def enter_backward(self, unit: "Unit", record: ForwardRecord | None = None) -> None:
        """Note that backward reached ``unit``; the first call waits for the end of the pass.

        ``record`` is of the forward that it belongs to, if that is known.
        """
        if not self._in_backward:
            self._in_backward = True
            if self.manual is None:
                self.manual = any(unit.manual_finalization for unit in self._units.live())
            on_backward_end(self._leave_backward)
            self.turns.agree()
        if record is None:
            record = self._record_of(unit)
        if record is not None and record.cursor is None:
            self._walk(record)

    def _record_of(self, unit: "Unit") -> ForwardRecord | None:
        """Return the forward to which a use of ``unit`` in backward belongs, by all that is known.

        One that backward has come to; else the newest that waits for a backward; else the newest,
        for a graph that is used once more.
        """
        found = [each for each in self._records_alive() if each.holds(unit.index)]
        for wanted in (
            lambda each: each.cursor is not None,
            lambda each: not each.spent,
            lambda each: True,
        ):
            record = next(filter(wanted, reversed(found)), None)
            if record is not None:
                return record
        return None

    def _walk(self, record: ForwardRecord) -> None:
        """Begin with the units of another forward: backward is done with those of the last."""
        if self._walked:
            self._walk_to_the_end(self._walked[-1])
        record.walk()
        self._walked.append(record)
        self.turns.expected |= record.armed | record.replicated
        for index in record.absent:
            unit = self._units.at(index)
            if unit is not None and not self.awaits(unit):
                self.turns.ready(unit)

    def place(self, unit: "Unit") -> tuple[ForwardRecord, int] | None:
        """Return the place of ``unit`` that backward must have come to, if any."""
        record = self._walked[-1] if self._walked else None
        at = record.next_place(unit.index) if record is not None else None
        return None if at is None else (record, at)

    def catch_up(self, record: ForwardRecord, place: int) -> None:
        """Do what other ranks may do with the units that backward has passed by on its way."""
        for at in range(record.cursor - 1, place, -1):
            unit = self._units.at(record.units[at])
            self._come_to(record, at)
            for again in record.rerun(at):
                other = self._units.at(record.units[again])
                if other is not None:
                    other.pass_by_forward()
            if unit is not None:
                unit.pass_by()
                self.prefetch_backward(unit, record, at)
        self._come_to(record, place)

    def _come_to(self, record: ForwardRecord, place: int) -> None:
        record.cursor = place
        self._finish(record, record.over(place))

    def prefetch_backward(self, unit: "Unit", record: ForwardRecord, place: int) -> None:
        """Gather what the user chose, or the unit that ended its forward just before ``unit``."""
        for ref in unit.backward_prefetch:
            self._prefetch(ref())
        if place and not unit.backward_prefetch:
            other = self._units.at(record.units[place - 1])
            if other is None or not other.lean:
                self._prefetch(other)
            elif other.gathers_in_backward:
                self.launch_postponed()
                self._postponed = weakref.ref(other)

    def launch_postponed(self) -> None:
        """Launch a gather that was put off: no other collective of these units may overtake it."""
        postponed, self._postponed = self._postponed, None
        unit = postponed() if postponed is not None else None
        if unit is not None:
            unit.prefetch()

    def finish(self, record: ForwardRecord, place: int) -> None:
        """Note that autograd is done with the unit at ``place``."""
        if record.cursor is not None:
            self._finish(record, [place])

    def _finish(self, record: ForwardRecord, places: list[int]) -> None:
        for at in places:
            unit = self._units.at(record.units[at])
            if record.finish(at) and unit is not None:
                self._settle(unit)

    def _settle(self, unit: "Unit") -> None:
        """Reduce and free ``unit``, unless backward may come to it in another place."""
        if not self.awaits(unit):
            unit.leave_early()

    def awaits(self, unit: "Unit") -> bool:
        """Tell whether this backward may come to ``unit``, or come to it once more.

        Of forwards that it has not come to nobody knows whether it will.
        """
        return any(record.awaits(unit.index) for record in self._records_alive())

    def _records_alive(self) -> list[ForwardRecord]:
        """Return what forwards left whose graphs are there, the newest last."""
        self._records = [ref for ref in self._records if ref() is not None]
        return [record for ref in self._records if (record := ref()) is not None]

    def _walk_to_the_end(self, record: ForwardRecord) -> None:
        """Pass by the units that are left in ``record``: other ranks may come to them."""
        if 0 <= record.first < record.cursor:
            self.catch_up(record, record.first - 1)
        self._come_to(record, -1)

    def _leave_backward(self) -> None:
        self.launch_postponed()
        if self._walked:
            self._walk_to_the_end(self._walked[-1])
        self._in_backward = False
        self.turns.reduce_the_rest()
        if not self.manual:
            self.manual = None
            if all(unit.is_last_backward for unit in self._units.live()):
                self.turns.finish()
        walked, self._walked = self._walked, []
        for record in walked:
            record.leave()
        entries = {record.entry for record in walked}
        waiting = set().union(
            *(r.armed for r in self._records_alive() if not r.spent and r.entry not in entries)
        )
        self.turns.end_pass()
        for unit in self._units.live():
            unit.leave_backward(reshard=unit.index not in waiting)
        HERE.at("code after a backward")

    def reduce_now(self, units: "list[Unit]") -> None:
        """Reduce what waits in ``units`` outside of backward, and hand the results over.

        All of them that ever ran take part, whatever waits in them on this rank.
        """
        if self._in_backward or self._depth:
            raise RuntimeError(
                "gradients cannot be reduced by hand inside of a forward or backward; call "
                "reduce_gradients() after it, or reset_iter_state() if it raised."
            )
        self.turns.start_all(units)
        self.turns.finish()

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
        units = self._units.live()
        self.turns.start_all(units, due=True)
        for unit in units:
            unit.leave_backward(reshard=True)
        self.manual = None

    # --- recovery ---------------------------------------------------------------------------

    def reset(self, *, drop_gradients: bool) -> None:
        """Forget the iteration: wait for collectives under way and shard everything.

        ``drop_gradients`` also forgets gradients that were not reduced: some may be missing.
        """
        self._depth = 0
        self._began.clear()
        self._in_backward = False
        self._forward_order = []
        self._record, self._hidden, self._frame = None, {}, None
        self._records.clear()
        for record in self._walked:
            record.leave()
        self._walked.clear()
        self._postponed = None
        self.turns.forget()
        if drop_gradients:
            self.manual = self.awaited = None
        for unit in self._units.live():
            unit.reset(drop_gradients=drop_gradients)
