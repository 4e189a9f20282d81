# SPDX-License-Identifier: Apache-2.0
"""What this rank does now; and for a collective that fails, what all the others did."""

import time
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist

from vescale.fsdp.phase_board import Row, board, where_ranks_are


@dataclass(slots=True)
class Phase:
    """The phase that this process is in.

    One process is one rank. Writing it costs three assignments and a clock: nothing is sent.
    """

    what: str = "before the first forward"
    waits: bool = False
    forwards: int = 0
    changes: int = 0
    since: float = 0.0

    def at(self, what: str, unit: str | None = None, *, waits: bool = False) -> None:
        """Note that ``what`` begins, of ``unit`` by its name ("" for the root) if it is of one.

        ``waits``: other ranks are needed to leave it.
        """
        self.what = _name(what, unit)
        self.waits = waits
        self.since = time.time()
        self.changes += 1

    def row(self) -> Row:
        """Return what the other ranks may read."""
        return Row(self.what, self.waits, self.forwards, self.since)


HERE = Phase()


class waiting:
    """Context of a collective: if it fails, the error names it and the phase of every rank.

    What failed is what torch raises as RuntimeError, but for a lack of memory: that is no matter of
    the other ranks, and stays ``torch.OutOfMemoryError``. ``aside``: in a thread beside training,
    whose phase is not the rank's.
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
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
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
