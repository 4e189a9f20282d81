# SPDX-License-Identifier: Apache-2.0
"""The units of one root by number, so that an order of them can be noted and compared."""

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vescale.fsdp.unit import Unit


class UnitList:
    """Units by index, held weakly: one that is gone leaves its index empty."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Unit]] = []

    def add(self, unit: "Unit") -> int:
        """Take ``unit`` in and return its index."""
        self._refs.append(weakref.ref(unit))
        return len(self._refs) - 1

    def __len__(self) -> int:
        return len(self._refs)

    def at(self, index: int) -> "Unit | None":
        """Return the unit of ``index``, None if it is gone."""
        return self._refs[index]()

    def live(self) -> "list[Unit]":
        """Return the units that are there, by index."""
        return [unit for ref in self._refs if (unit := ref()) is not None]
