# SPDX-License-Identifier: Apache-2.0
"""Turn the phases of a rank into the events of a Chrome trace.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vescale.fsdp.param_group import ParamGroup, State

HOST, GATHER, HELD, REDUCE = 0, 100, 200, 300  # numbers of tracks, and of the first of a kind
KINDS = {HOST: "host", GATHER: "gather", HELD: "full parameters", REDUCE: "reduce"}
AFTER_FORWARD = "code after the forward"


class Span(NamedTuple):
    """Something that has begun; ``start`` is in microseconds."""

    name: str
    kind: str
    start: float
    unit: str | None = None


@dataclass(slots=True)
class Lanes:
    """Spans that may overlap, each on the first of several tracks that is free."""

    first: int
    open: dict[int, tuple[Span, int, dict[str, Any]]] = field(default_factory=dict)

    def begin(self, key: int, span: Span, args: dict[str, Any]) -> None:
        """Open a span, unless there is one for ``key``."""
        taken = {track for _, track, _ in self.open.values()}
        track = next(n for n in range(self.first, self.first + 100) if n not in taken)
        self.open.setdefault(key, (span, track, args))


class Recorder:
    """Keep the events of one rank, as a ``phases.Listener``. Times are those of the host.

    On the track of the host spans lie in each other: a wait in a forward, a forward in that of the
    module around it. Gathers, full parameters in memory, and reductions have tracks of their own.
    """

    def __init__(self, rank: int, host: str) -> None:
        self._offset = time.time_ns() - time.perf_counter_ns()
        self._rank = rank
        self._stack: list[Span] = []
        self._lanes = {kind: Lanes(kind) for kind in (GATHER, HELD, REDUCE)}
        self._tracks: set[int] = set()
        self._events: list[dict[str, Any]] = [
            {
                "ph": "M",
                "name": "process_name",
                "pid": rank,
                "args": {"name": f"rank {rank} on {host}"},
            },
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        ]

    def end(self) -> list[dict[str, Any]]:
        """Close what is open, and return all events."""
        self._pop_to(0)
        for kind, lanes in self._lanes.items():
            for key in list(lanes.open):
                self._close(kind, key)
        for track in sorted(self._tracks):
            kind = track // 100 * 100
            number = f" {track - kind + 1}" if kind else ""
            for name, value in (
                ("thread_name", {"name": f"{KINDS[kind]}{number}"}),
                ("thread_sort_index", {"sort_index": track}),
            ):
                self._events.append(
                    {"ph": "M", "name": name, "pid": self._rank, "tid": track, "args": value}
                )
        return self._events

    # --- the host ---------------------------------------------------------------------------

    def at(self, what: str, unit: str | None, waits: bool) -> None:
        """Begin a phase, and end those that it comes after."""
        if waits:
            self.push(what, "wait", unit)
        elif what == "forward":
            self.push(what, "compute", unit)
        elif what == AFTER_FORWARD:
            self._pop("forward", unit)
        elif what == "backward":
            self._pop("backward")
            self.push(what, "compute", unit)
        else:  # code outside of units
            self._pop_to(0)

    def back(self) -> None:
        """End a wait."""
        if self._stack and self._stack[-1].kind == "wait":
            self._pop_to(len(self._stack) - 1)

    def push(self, what: str, kind: str, unit: str | None = None) -> None:
        """Begin a span in those that have begun."""
        name = what if unit is None else f"{what} {_shown(unit)}"
        self._stack.append(Span(name, kind, self._now(), unit))

    def pop(self, what: str) -> None:
        """End the innermost span of that name and all in it; do nothing if it has not begun."""
        for depth in reversed(range(len(self._stack))):
            if self._stack[depth].name == what:
                return self._pop_to(depth)
        return None

    def _pop(self, what: str, unit: str | None = None) -> None:
        """End the innermost span ``what``, of ``unit`` if that is given."""
        for depth in reversed(range(len(self._stack))):
            span = self._stack[depth]
            if span.name.startswith(f"{what} ") and unit in (None, span.unit):
                return self._pop_to(depth)
        return None

    def _pop_to(self, depth: int) -> None:
        while len(self._stack) > depth:
            self._add(self._stack.pop(), HOST, {})

    # --- groups of parameters ---------------------------------------------------------------

    def moved(self, group: ParamGroup) -> None:
        """Begin and end what is shown of the parameters of ``group``, which is in a new state."""
        if group.state is State.GATHERING:
            self._open(GATHER, group)
            return
        self._close(GATHER, id(group))
        if group.state is State.GATHERED:
            self._open(HELD, group)
        else:
            self._close(HELD, id(group))

    def reduces(self, group: ParamGroup, *, begins: bool) -> None:
        """Begin or end what is shown of a reduction of ``group``."""
        if begins:
            self._open(REDUCE, group)
        else:
            self._close(REDUCE, id(group))

    def _open(self, kind: int, group: ParamGroup) -> None:
        dtype = group.reduce_dtype if kind == REDUCE else group.param_dtype
        args = {
            "dtype": str(dtype).removeprefix("torch."),
            "bytes": group.plan.buffer_numel * dtype.itemsize,
        }
        name = _shown(group.name)
        self._lanes[kind].begin(id(group), Span(name, KINDS[kind], self._now()), args)

    def _close(self, kind: int, key: int) -> None:
        found = self._lanes[kind].open.pop(key, None)
        if found is not None:
            span, track, args = found
            self._add(span, track, args)

    # --- events -----------------------------------------------------------------------------

    def _now(self) -> float:
        return (time.perf_counter_ns() + self._offset) / 1000

    def _add(self, span: Span, track: int, args: dict[str, Any]) -> None:
        self._tracks.add(track)
        self._events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "ts": span.start,
                "dur": self._now() - span.start,
                "pid": self._rank,
                "tid": track,
                "args": args,
            }
        )


def _shown(unit: str) -> str:
    return unit or "(root)"
