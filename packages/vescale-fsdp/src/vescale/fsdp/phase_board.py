# SPDX-License-Identifier: Apache-2.0
"""The phases of all ranks, where all of them can read them when something hangs.

A rank writes its phase into the store of the default process group when a collective fails, and
before that when it did not go on for some time: a thread looks now and then. So ranks that go on
write nothing, and one that hangs in a data loader, or sleeps, is known before the others give up.
A rank whose process ended does not write: what it had written last may be there, or nothing.

The store is one process, so of more ranks than ``MOST_READERS`` only as many read it a minute.
"""

import atexit
import json
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from vescale.fsdp._torch_compat import store_of, timeout_of

if TYPE_CHECKING:
    from vescale.fsdp.phases import Phase

logger = logging.getLogger("vescale.fsdp")

MOST_READERS = 64
PATIENCE = 2.0  # seconds in which ranks that fail together write
LOOKS = 4  # times that a rank is looked at within the timeout of a collective
LONGEST_LOOK = 10.0  # seconds
GOES_ON = "goes on"
NO_WORD = (
    "no word: it went on until a moment ago, has not come to a collective of vescale.fsdp yet, or "
    "its process has ended"
)


class Row(NamedTuple):
    """A rank's phase: ``forwards`` counts outermost forwards, ``since`` is seconds of the epoch."""

    what: str
    waits: bool
    forwards: int
    since: float


class Board:
    """One row for each rank in the store of ``world``, the default process group."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        # Weakly: a store that outlives its group is met again by the next group of the process.
        self._world = weakref.ref(world)
        self.process = os.getpid()
        self.rank, self.ranks = world.rank(), world.size()
        self._ended = threading.Event()
        self._timeout = float("inf")  # of the group that gives up first, in seconds
        self._groups: set[str] = set()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._shown: int | None = None  # the count of changes at which a row was written

    def is_of(self, world: dist.ProcessGroup | None) -> bool:
        """Tell whether this is the board of ``world``, in this process."""
        return world is not None and self._world() is world and self.process == os.getpid()

    def _store(self) -> dist.Store:
        world = self._world()
        if world is None:
            raise RuntimeError("the default process group was destroyed.")
        return dist.PrefixStore("vescale.fsdp/phases", store_of(world))

    # --- write ------------------------------------------------------------------------------

    def watch(self, phase: "Phase", group: dist.ProcessGroup | None) -> None:
        """Look after ``phase`` from now on, often enough for the timeout of ``group``."""
        group = group or dist.group.WORLD
        if group.group_name not in self._groups:
            self._groups.add(group.group_name)
            self._timeout = min(self._timeout, timeout_of(group).total_seconds())
        if self._thread is None:
            self._set(GOES_ON)
            self._thread = threading.Thread(
                target=self._look_after, args=(phase,), name="vescale_phases", daemon=True
            )
            self._thread.start()

    def show(self, phase: "Phase") -> None:
        """Let the others know where this rank is, until it goes on."""
        with self._lock:
            self._shown = phase.changes
            self._set(json.dumps(phase.row()))

    def _take_back(self, phase: "Phase") -> None:
        with self._lock:
            if self._shown is not None and self._shown != phase.changes:
                self._shown = None
                self._set(GOES_ON)

    def _set(self, text: str) -> None:
        self._store().set(str(self.rank), text)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LONGEST_LOOK)

    @property
    def _interval(self) -> float:
        return min(self._timeout / LOOKS, LONGEST_LOOK)

    def _look_after(self, phase: "Phase") -> None:
        seen, warned = phase.changes, False
        try:
            while not self._ended.wait(self._interval) and self._world() is not None:
                changes = phase.changes
                if changes != seen:
                    self._take_back(phase)
                    seen, warned = changes, False
                elif self._shown != changes:
                    self.show(phase)
                elif not warned and time.time() - phase.since > 0.75 * self._timeout:
                    self._warn()
                    warned = True
        except RuntimeError as error:
            # The process that has the store may end first, at the end of a run.
            logger.info("rank %d does not share its phase any more: %s", self.rank, error)

    def _warn(self) -> None:
        """Tell of a hang before the watchdog of a backend ends the process without an exception."""
        rows = self.read()
        known = [row for row in rows.values() if row is not None]
        if any(row.waits for row in known) or len({(row.what, row.forwards) for row in known}) > 1:
            logger.warning(
                "rank %d did not go on for %d s, and a collective fails after %d s.%s",
                self.rank,
                0.75 * self._timeout,
                self._timeout,
                describe(rows),
            )

    # --- read -------------------------------------------------------------------------------

    def may_read(self) -> bool:
        """Tell whether the store is to be asked by one more rank."""
        if self.ranks <= MOST_READERS:
            return True
        return self._store().add(f"readers/{int(time.time() / 60)}", 1) <= MOST_READERS

    def read(self) -> dict[int, Row | None]:
        """Return the rows of all ranks, None for a rank that goes on or never wrote."""
        keys = [str(rank) for rank in range(self.ranks)]
        store = self._store()
        if not store.check(keys):
            keys = [key for key in keys if store.check([key])]
        rows: dict[int, Row | None] = dict.fromkeys(range(self.ranks))
        for key, text in zip(keys, store.multi_get(keys), strict=True):
            if text.decode() != GOES_ON:
                rows[int(key)] = Row(*json.loads(text))
        return rows

    def read_patiently(self) -> dict[int, Row | None]:
        """Return the rows of all ranks, once all have written or ``PATIENCE`` is over."""
        rows, end = self.read(), time.monotonic() + PATIENCE
        while None in rows.values() and time.monotonic() < end:
            time.sleep(PATIENCE / 20)
            rows = self.read()
        return rows


_board: Board | None = None


def board() -> Board | None:
    """Return the board of the default process group; None where there are no other ranks."""
    global _board
    world = dist.group.WORLD
    if _board is not None:
        if _board.is_of(world):
            return _board
        _close()
        _board = None
    if world is None or world.size() == 1 or "fake" in dist.get_backend(world):
        return None
    _board = Board(world)
    return _board


@atexit.register
def _close() -> None:
    """End the thread before the interpreter ends: it must not be inside of the store then."""
    if _board is not None and _board.process == os.getpid():
        _board.close()


def where_ranks_are(phase: "Phase") -> str:
    """Show this rank's ``phase``, and return as text, to follow an error, where all ranks are."""
    shared = board()
    if shared is None:
        return ""
    try:
        shared.show(phase)
        if not shared.may_read():
            return f"\nWhere the ranks were is in the errors of {MOST_READERS} other ranks."
        rows = shared.read_patiently()
    except RuntimeError as error:
        return f"\nWhere the ranks were is not known: the store of the process group: {error}"
    return describe(rows)


def describe(rows: dict[int, Row | None]) -> str:
    """Return where the ranks are as lines, those of the fewest ranks first."""
    places: dict[tuple[str, int], list[int]] = {}
    for rank, row in rows.items():
        place = (NO_WORD, 0) if row is None else (row.what, row.forwards)
        places.setdefault(place, []).append(rank)
    lines = ["\nWhere the ranks were:"]
    for (what, forwards), ranks in sorted(places.items(), key=lambda item: len(item[1])):
        known = [row.since for rank in ranks if (row := rows[rank]) is not None]
        since = time.strftime("%H:%M:%S", time.gmtime(min(known))) if known else ""
        after = f", in or after forward {forwards}, since {since} UTC" if known else ""
        lines.append(f"  {ranges_of(ranks)}: {what}{after}")
    return "\n".join(lines)


def ranges_of(ranks: list[int]) -> str:
    """Return sorted ranks as text: "rank 3", or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
