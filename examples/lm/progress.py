# SPDX-License-Identifier: Apache-2.0
"""Show how training goes: a live bar on a terminal, a line now and then anywhere else."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

LINES = 20  # that a run prints where there is no terminal, at most, unless they take long
PATIENCE_SECONDS = 10.0


class Report(Protocol):
    """What the training loop calls after each step."""

    def __call__(self, step: int, loss: float, tokens_per_second: float | None) -> None: ...


@contextmanager
def progress(title: str, first: int, steps: int, device: torch.device, *, show: bool):
    """Yield a Report for steps ``first`` to ``steps``; silent unless ``show``."""
    if not show:
        yield lambda step, loss, tokens_per_second: None
        return
    try:
        from rich.console import Console
    except ImportError:
        terminal = False
    else:
        terminal = Console().is_terminal
    with (_bar if terminal else _lines)(title, first, steps, device) as report:
        yield report


@contextmanager
def _lines(title: str, first: int, steps: int, device: torch.device) -> Iterator[Report]:
    started = shown = time.monotonic()
    every = max(1, (steps - first) // LINES)

    def report(step: int, loss: float, tokens_per_second: float | None) -> None:
        nonlocal shown
        now = time.monotonic()
        if step % every == 0 or step in (first + 1, steps) or now - shown > PATIENCE_SECONDS:
            shown = now
            rate = f"  {tokens_per_second:8,.0f} tokens/s" if tokens_per_second else ""
            print(
                f"{title}  step {step:>{len(str(steps))}}/{steps}  loss {loss:.4f}{rate}"
                f"  {readable(memory_nbytes(device))}  {now - started:.0f} s",
                flush=True,
            )

    yield report


@contextmanager
def _bar(title: str, first: int, steps: int, device: torch.device) -> Iterator[Report]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss [bold cyan]{task.fields[loss]}[/]"),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[memory]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, expand=True) as bar:
        task = bar.add_task(
            title, total=steps, completed=first, loss="...", rate="", memory="", start=True
        )

        def report(step: int, loss: float, tokens_per_second: float | None) -> None:
            rate = f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
            memory = readable(memory_nbytes(device))
            bar.update(task, completed=step, loss=f"{loss:.4f}", rate=rate, memory=memory)

        yield report


def memory_nbytes(device: torch.device) -> int:
    """Return the bytes that this rank uses now: of the GPU, else of the process (RSS)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory_nbytes(device)
    return pages * resource.getpagesize()


def peak_memory_nbytes(device: torch.device) -> int:
    """Return the most bytes that this rank has used so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def readable(nbytes: int) -> str:
    """Return bytes in MiB or GiB."""
    mebibytes = nbytes / 2**20
    return f"{mebibytes:.0f} MiB" if mebibytes < 4096 else f"{mebibytes / 1024:.1f} GiB"
