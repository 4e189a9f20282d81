# SPDX-License-Identifier: Apache-2.0
"""Record what units do in a step, for a picture of it in time."""

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from vescale.fsdp.inspect.trace import Recorder
from vescale.fsdp.phases import HERE


@contextmanager
def record_step(folder: str | PathLike) -> Iterator[Path]:
    """Write what this rank's units do inside of the ``with`` to ``folder``, as a Chrome trace.

    Every rank writes a file of its own, ``rank0.json`` and so on, without communication and also
    where the step raises; ``as`` gives its path. ``merge_traces(folder, path)`` makes one of them.
    Open either at https://ui.perfetto.dev. There may be several steps inside.

    The host's track shows forwards and backwards by unit, optimizer steps, and in them each
    collective while it is launched or waited for; others show each unit's gather from launch to
    use, its full parameters while they are in memory, and its reduction. All times are of the
    host: on a GPU, where work is launched ahead, of the launches. ``torch.profiler`` has the
    device's own, with ranges named ``vescale.fsdp.gather`` and ``vescale.fsdp.reduce``.

    Raises RuntimeError inside of another ``record_step``.
    """
    if not isinstance(folder, str | PathLike):
        raise TypeError(f"folder is a {type(folder).__name__}, expected the name of a folder.")
    if HERE.listener is not None:
        raise RuntimeError("a step is being recorded already; leave that record_step() first.")
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}.json"
    recorder = Recorder(rank, platform.node())

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        recorder.push(_name(optimizer), "optimizer")

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        recorder.pop(_name(optimizer))

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    HERE.listener = recorder
    try:
        yield path
    finally:
        HERE.listener = None
        for hook in hooks:
            hook.remove()
        _write(path, recorder.end())


def merge_traces(folder: str | PathLike, path: str | PathLike) -> None:
    """Write the traces of all ranks in ``folder`` to ``path``, as one.

    For one process, when all ranks have left ``record_step``. Ranks on several hosts stand as far
    apart as the hosts' clocks. Raises ValueError where there are no traces.
    """
    files = sorted(Path(folder).glob("rank*.json"))
    if not files:
        raise ValueError(
            f"{str(folder)!r} has no rank0.json or other trace; pass the folder that "
            "record_step() was given."
        )
    events = []
    for file in files:
        events += json.loads(file.read_text())["traceEvents"]
    _write(Path(path), events)


def _write(path: Path, events: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__name__}.step"
