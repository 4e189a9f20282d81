# SPDX-License-Identifier: Apache-2.0
"""When the units of one root reduce their gradients: in which order, and how many at once.

The order is the reverse of that in which units were first used, ever. A unit that is ready early
waits for its turn, and one whose parameters had no gradient takes its turn with zeros: so ranks
whose graphs differ begin the same collectives. Replicas agree on that order once.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vescale.fsdp.agreement import agree_on_order
from vescale.fsdp.unit_list import UnitList

if TYPE_CHECKING:
    from vescale.fsdp.param_group import ParamGroup
    from vescale.fsdp.unit import Unit

ALL_REDUCES_IN_FLIGHT = 1


class ReduceTurns:
    """Order and progress of the reductions of the units of one root.

    ``on_start`` is called before each one begins.
    """

    def __init__(self, units: UnitList, on_start: Callable[[], None]) -> None:
        self._units, self._on_start = units, on_start
        self._order: list[int] = []  # by first start of forward, ever
        self._agreed = False  # whether the replicas have agreed on it
        self.expected: set[int] = set()  # units that the backward that runs has to reduce
        self._ready: set[int] = set()
        self.reducing: list[ParamGroup] = []  # over the ranks that shard
        self.replicating: list[ParamGroup] = []  # then over those that repeat

    def note(self, unit: "Unit") -> None:
        """Give ``unit`` its place in the order, if this is its first forward."""
        if unit.index not in self._order:
            self._order.append(unit.index)

    def agree(self) -> None:
        """Reduce in one order on all replicas, though each ran other units first. Only once."""
        if self._agreed:
            return
        self._agreed = True
        units = [unit for unit in self._units.live() if unit.replicated]
        data = dict.fromkeys(group.data for unit in units for group in unit.groups)
        for mesh in data:
            if mesh.replicas > 1:
                device = units[0].groups[0].device
                self._order = agree_on_order(
                    self._order, len(self._units), mesh.replicate_group, device
                )

    def ready(self, unit: "Unit") -> None:
        """Note that backward has passed ``unit``, and reduce what has its turn.

        A unit that lends a parameter has its turn at the end of the pass: the gradient is complete
        when all borrowers are done.
        """
        if unit.lends or not (unit.index in self.expected or unit.has_gradients):
            return
        self._ready.add(unit.index)
        for index in reversed(self._order):
            if index in self._ready:
                self._reduce(index)
            elif index in self.expected and not self._lends(index):
                return

    def reduce_the_rest(self) -> None:
        """Reduce what is expected still, or has gradients: backward is at its end."""
        for index in reversed(self._order):
            unit = self._units.at(index)
            if index in self.expected or (unit is not None and unit.has_gradients):
                self._reduce(index)
        for unit in self._units.live():  # an owner that never ran itself, only its borrowers
            if unit.has_gradients or unit.index in self.expected:
                self._reduce(unit.index)

    def start_all(self, units: "list[Unit]", *, due: bool = False) -> None:
        """Start the reductions of ``units`` that ever ran, with ``due`` only of those that wait."""
        ran = [unit for unit in units if unit.index in self._order]
        ran.sort(key=lambda unit: -self._order.index(unit.index))
        for unit in [*ran, *(unit for unit in units if unit.lends and unit not in ran)]:
            for group in unit.groups:
                waits = group.has_gradients and group.reduce_options.sync
                if group.trainable and (waits or not due):
                    self._start(group)

    def make_room(self, left: int) -> None:
        """Wait for what is under way over the ranks that shard, but for the ``left`` newest ones.

        Their buffers go. It begins nothing, so each rank may call it when it likes.
        """
        for group in self.reducing[: len(self.reducing) - left]:
            group.collect_reduce()

    def finish(self) -> None:
        """Wait for the reductions under way and hand their results over."""
        while self.reducing:
            self._advance(self.reducing.pop(0))
        while self.replicating:
            self.replicating.pop(0).finish_reduce()
        for unit in self._units.live():
            unit.settle()

    def share(self, other: "ReduceTurns") -> None:
        """Count reductions in flight together with those of ``other``, a root beside this one."""
        self.finish()
        self.reducing, self.replicating = other.reducing, other.replicating

    def forget(self) -> None:
        """Forget what is expected, ready or under way of these units."""
        self.expected.clear()
        self._ready.clear()
        mine = {id(group) for unit in self._units.live() for group in unit.groups}
        for under_way in (self.reducing, self.replicating):
            under_way[:] = [group for group in under_way if id(group) not in mine]

    def end_pass(self) -> None:
        """Note that a backward has ended: what was not reduced will not be."""
        self.expected.clear()
        self._ready.clear()

    def _lends(self, index: int) -> bool:
        unit = self._units.at(index)
        return unit is not None and unit.lends

    def _reduce(self, index: int) -> None:
        self.expected.discard(index)
        self._ready.discard(index)
        unit = self._units.at(index)
        if unit is None:
            return
        for group in unit.groups:
            if group.trainable and not group.reduce_options.sync:
                group.put_off_reduce()
            elif group.trainable:
                self._start(group)

    def _start(self, group: "ParamGroup") -> None:
        while len(self.reducing) >= group.reduce_options.in_flight:
            self._advance(self.reducing.pop(0))
        self._on_start()
        group.start_reduce()
        self.reducing.append(group)

    def _advance(self, group: "ParamGroup") -> None:
        """Let the all-reduce of ``group`` run while the next group is reduced."""
        if group.advance_reduce():
            self.replicating.append(group)
            while len(self.replicating) > ALL_REDUCES_IN_FLIGHT:
                self.replicating.pop(0).finish_reduce()
