# SPDX-License-Identifier: Apache-2.0
"""What one outermost forward leaves for the backward that comes back to it. Knows integers only.

Every rank keeps the same record, whatever its data: backward walks it from the end to the begin,
and a rank whose graph leaves some units out walks past them.
"""

from collections import Counter
from collections.abc import Set


class ForwardRecord:
    """The units that ran in one outermost forward, by *place*: in the order in which they ended.

    ``entry`` is the unit that was called first, ``replicated`` the units within it whose gradients
    are reduced over replicas too: another replica may have run them, if this one has not.
    """

    def __init__(self, entry: int, replicated: frozenset[int] = frozenset()) -> None:
        self.entry, self.replicated = entry, replicated
        self.units: list[int] = []  # by place
        self._began: list[int] = []  # by place: how many units had ended when it began
        self.armed: set[int] = set()  # the units that take part in a reduction
        self.hooked = False  # whether an output of the entry holds this; else nobody may
        self.first = -1  # the first place that a backward may come to
        self._regions: list[object] = []  # by place: the checkpoint that runs it again, or None
        self._rerun: list[object] = []  # those that run again in the backward that walks it
        self._next = -1  # the place whose forward runs again next
        self.spent = False  # whether a backward has walked it
        self.cursor: int | None = None  # in the backward that walks it: the place it has come to
        self._times: Counter[int] = Counter()  # how many places each unit has
        self._left: Counter[int] = Counter()  # and with how many of them backward is not done
        self._done: set[int] = set()

    def add(self, unit: int, began: int, *, needed: bool, region: object = None) -> int:
        """Note that ``unit`` ended, ``began`` places having been there; return its place.

        ``needed``: whether a backward can come to it. ``region`` stands for the call of reentrant
        checkpointing around it, if any. Modules of one unit in a row have one place.
        """
        if not self.units or self.units[-1] != unit or self._regions[-1] is not region:
            self.units.append(unit)
            self._began.append(began)
            self._regions.append(region)
            self._times[unit] += 1
            self.spent = False
        if needed and self.first < 0:
            self.first = len(self.units) - 1
        return len(self.units) - 1

    def holds(self, unit: int) -> bool:
        """Tell whether ``unit`` ran in the forward, or lent a parameter to one that did."""
        return unit in self._times or unit in self.armed

    @property
    def absent(self) -> Set[int]:
        """The units that this replica did not run, and another one may have."""
        return self.replicated.difference(self._times)

    def walk(self) -> None:
        """Begin a backward at the end."""
        self.cursor = len(self.units)
        self._left, self._done = Counter(self._times), set()
        self._rerun, self._next = [], -1

    def leave(self) -> None:
        """Note that the backward has ended."""
        self.cursor, self.spent = None, True

    def is_ahead(self, place: int) -> bool:
        """Tell whether a backward has not come to ``place`` yet."""
        return self.cursor is None or place < self.cursor

    def next_place(self, unit: int) -> int | None:
        """Return the place of ``unit`` that backward comes to next, if any."""
        return next((at for at in range(self.cursor - 1, -1, -1) if self.units[at] == unit), None)

    def rerun(self, place: int) -> range:
        """Return the places that run again, in this order, when backward comes to ``place``.

        Those that one call of reentrant checkpointing was around; none the second time.
        """
        region = self._regions[place]
        if region is None or region in self._rerun:
            return range(0)
        self._rerun.append(region)
        same = [at for at, each in enumerate(self._regions) if each is region]
        self._next = same[0]
        return range(same[0], same[-1] + 1)

    def place_again(self, unit: int) -> int | None:
        """Return the place of ``unit``, whose forward has run again, if it is one of ``rerun``."""
        for at in (self._next, self._next - 1):  # the latter for several modules of one unit
            if 0 <= at < len(self.units) and self.units[at] == unit and self._regions[at]:
                self._next = at + 1
                return at
        return None

    def over(self, place: int) -> list[int]:
        """Return the places that backward is done with when it comes to ``place``.

        Autograd goes from new to old: those that began after ``place`` had ended.
        """
        later = range(len(self.units) - 1, place, -1)
        return [at for at in later if self._began[at] > place and at not in self._done]

    def finish(self, place: int) -> bool:
        """Note that backward is done with ``place``; tell whether it was not so before."""
        if place in self._done:
            return False
        self._done.add(place)
        self._left[self.units[place]] -= 1
        return True

    def awaits(self, unit: int) -> bool:
        """Tell whether a backward will still come to ``unit``, on this rank or another."""
        if self.cursor is not None:
            return self._left[unit] > 0
        return not self.spent and (unit in self._times or unit in self.replicated)
