# SPDX-License-Identifier: Apache-2.0
"""What this rank does now; and for a collective that fails, what all the others did."""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from vescale.fsdp.phase_board import Row, board, where_ranks_are

if TYPE_CHECKING:
    from vescale.fsdp.param_group import ParamGroup


class Listener(Protocol):
    """What hears of phases while a step is recorded."""

    def at(self, what: str, unit: str | None, waits: bool) -> None:
        """Hear what ``Phase.at`` notes."""

    def back(self) -> None:
        """Hear that what waited has ended, and the phase is the one before."""

    def moved(self, group: "ParamGroup") -> None:
        """Hear that ``group`` is in another state."""

    def reduces(self, group: "ParamGroup", *, begins: bool) -> None:
        """Hear that a reduction of ``group`` begins; or that none is under way any more."""


@dataclass(slots=True)
class Phase:
    """The phase that this process is in.

    One process is one rank. Writing it costs three assignments and a clock: nothing is sent. While
    a step is recorded there is a ``listener``.
    """

    what: str = "before the first forward"
    waits: bool = False
    forwards: int = 0
    changes: int = 0
    since: float = 0.0
    listener: Listener | None = None

    def at(self, what: str, unit: str | None = None, *, waits: bool = False) -> None:
        """Note that ``what`` begins, of ``unit`` by its name ("" for the root) if it is of one.

        ``waits``: other ranks are needed to leave it.
        """
        self.what = _name(what, unit)
        self.waits = waits
        self.since = time.time()
        self.changes += 1
        if self.listener is not None:
            self.listener.at(what, unit, waits)

    def row(self) -> Row:
        """Return what the other ranks may read."""
        return Row(self.what, self.waits, self.forwards, self.since)


HERE = Phase()
_OF_THIS_RANK = (torch.OutOfMemoryError, NotImplementedError)


class waiting:
    """Context of a collective: if it fails, the error names it and the phase of every rank.

    What failed is what torch raises as RuntimeError, but for a lack of memory and for what is not
    implemented: they are no matter of the other ranks, and stay what they are. ``aside``: in a
    thread beside training, whose phase is not the rank's.
    """

    __slots__ = ("_aside", "_before", "_group", "_unit", "_what")

    def __init__(
        self,
        what: str,
        unit: str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        aside: bool = False,
    ) -> None:
        self._what, self._unit, self._group, self._aside = what, unit, group, aside

    def __enter__(self) -> None:
        self._before = HERE.what, HERE.waits, HERE.since
        if not self._aside:
            HERE.at(self._what, self._unit, waits=True)
        shared = board()
        if shared is not None:
            shared.watch(HERE, self._group)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if HERE.listener is not None and not self._aside:
            HERE.listener.back()
        if isinstance(error, RuntimeError) and not isinstance(error, _OF_THIS_RANK):
            rank = dist.get_rank() if dist.is_initialized() else 0
            what = _name(self._what, self._unit)
            raise RuntimeError(
                f"the {what} failed on rank {rank}: a rank may have died, or be at something else: "
                f"{error}{where_ranks_are(HERE)}"
            ) from error
        if not self._aside:
            HERE.what, HERE.waits, HERE.since = self._before
            HERE.changes += 1


def _name(what: str, unit: str | None) -> str:
    return what if unit is None else f"{what} of unit {unit or '(root)'!r}"
