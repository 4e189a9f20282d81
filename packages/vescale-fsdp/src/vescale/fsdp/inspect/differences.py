# SPDX-License-Identifier: Apache-2.0
"""What ``diff`` finds: one entry for each tensor, the worst first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["only in a", "only in b", "shape", "dtype", "differs", "equal"]

COLUMNS = ("name", "", "elements", "max abs", "max rel", "NaN", "first at")
MOST_ROWS = 40
SEVERITY = {"only in a": 0, "only in b": 1, "shape": 2, "dtype": 3, "differs": 4, "equal": 5}


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of ``a`` or ``b``, described as ``a`` and ``b`` have it; "" where one lacks it.

    ``count`` of ``numel`` elements differ, the first one, in row-major order, at index ``first``. A
    NaN differs from all numbers, but not from a NaN in the same place; ``nans`` counts those of
    both. ``max_abs`` is the largest ``|a - b|`` among numbers, ``max_rel`` the same over the
    largest finite magnitude in either tensor. Where several ranks hold the same elements, as with
    replicas, the counts are those of the ones that differ most. With another dtype the values are
    compared as float64; with another shape, or on one side only, there is nothing to compare.
    """

    name: str
    status: Status
    a: str
    b: str
    numel: int
    count: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    nans: tuple[int, int] = (0, 0)
    first: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Diff:
    """All tensors of ``a`` and ``b``, the worst first; ``print`` it for a table.

    First what one side lacks, then other shapes and dtypes, then those that differ, by ``max_rel``
    and ``max_abs``, an infinite one and a NaN on one side in front; then those that are equal.
    """

    entries: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether both have the same tensors, with the same shapes, dtypes and values."""
        return all(entry.status == "equal" for entry in self.entries)

    def summary(self) -> str:
        """Return one line: how many tensors there are, and how many of each kind."""
        found = [entry.status for entry in self.entries]
        kinds = [f"{found.count(status)} {TEXT[status]}" for status in TEXT if status in found]
        return f"{len(found)} tensors: {', '.join(kinds)}" if found else "No tensors to compare."

    def __str__(self) -> str:
        shown = [e for e in self.entries if e.status != "equal" or any(e.nans)]
        if not shown:
            return self.summary()
        rows = [COLUMNS, *map(_cells, shown[:MOST_ROWS])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self.summary(), *(_aligned(row, widths) for row in rows)]
        if len(shown) > MOST_ROWS:
            lines.append(f"  and {len(shown) - MOST_ROWS} more")
        return "\n".join(lines)


TEXT = {
    "only in a": "only in a",
    "only in b": "only in b",
    "shape": "of another shape",
    "dtype": "of another dtype",
    "differs": "differ",
    "equal": "equal",
}


def ordered(entries: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return the entries as ``Diff`` has them."""

    def key(entry: Difference) -> tuple[float, ...]:
        lone_nan = entry.count > 0 and entry.nans[0] != entry.nans[1]
        return (SEVERITY[entry.status], -math.inf if lone_nan else -entry.max_rel, -entry.max_abs)

    return tuple(sorted(entries, key=key))


def _cells(entry: Difference) -> tuple[str, ...]:
    if entry.status in ("only in a", "only in b"):
        return (entry.name, f"{entry.status}: {entry.a or entry.b}", "", "", "", "", "")
    kind = entry.status if entry.a == entry.b else f"{entry.a} and {entry.b}"
    if entry.status == "shape":
        return (entry.name, kind, "", "", "", "", "")
    nans = "{:,} and {:,}".format(*entry.nans) if any(entry.nans) else ""
    numbers = (f"{entry.max_abs:.3g}", f"{entry.max_rel:.3g}") if entry.count else ("", "")
    first = str(list(entry.first)) if entry.first is not None else ""
    return (entry.name, kind, f"{entry.count:,} of {entry.numel:,}", *numbers, nans, first)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    left = 2  # columns of text; numbers stand right
    cells = [
        cell.ljust(width) if column < left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return ("  " + "  ".join(cells)).rstrip()
