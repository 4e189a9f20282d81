# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: ``run.json``, ``loss.png`` and ``layout.png``."""

import dataclasses
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lm.config import Config
from lm.reference import Difference
from vescale.fsdp import inspect

PACKAGES = ("vescale-fsdp", "vescale-dtensor", "torch", "numpy")
INK, SHARDED, REFERENCE = "#22262b", "#2f6fb3", "#e58a55"


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The numbers of a run; seconds and tokens are those of the sharded training alone."""

    world_size: int
    device: str
    losses: list[float]
    validation_loss: float
    tokens_per_second: float
    train_seconds: float
    peak_memory_nbytes: list[int]
    checkpoint: str | None
    reference_losses: list[float] | None = None
    difference: Difference | None = None


def write_report(folder: Path, config: Config, result: Result, layout: inspect.Layout) -> list[str]:
    """Write all files into ``folder`` and return their names; without matplotlib no pictures."""
    facts: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        **dataclasses.asdict(result),
        "layout": _layout_facts(layout),
        "versions": _versions(),
    }
    (folder / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
    try:
        inspect.plot(layout, folder / "layout.png")
    except ImportError:
        return ["run.json"]
    _plot_losses(result, folder / "loss.png")
    return ["run.json", "loss.png", "layout.png"]


def _layout_facts(layout: inspect.Layout) -> dict[str, Any]:
    return {
        "elements": layout.numel,
        "bytes_per_rank": layout.nbytes_per_rank,
        "padding": layout.padding,
        "groups": [
            {
                "unit": group.unit,
                "dtype": str(group.dtype),
                "elements": group.plan.numel,
                "shard_elements": group.plan.shard_numel,
                "padding_elements": group.plan.padding_numel,
                "padding": group.plan.padding,
            }
            for group in layout.groups
        ],
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _plot_losses(result: Result, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(1, len(result.losses) + 1)
    ranks = f"{result.world_size} ranks, sharded" if result.world_size > 1 else "1 rank"
    axes.plot(steps, result.losses, color=SHARDED, lw=2.4, label=ranks)
    title = f"loss {result.losses[0]:.2f} to {result.losses[-1]:.2f}"
    if result.reference_losses:
        label = "one process, stock torch"
        axes.plot(steps, result.reference_losses, color=REFERENCE, lw=1, ls="--", label=label)
        largest = result.difference.largest
        title += f", largest difference {largest:.1e}" if largest else ", equal in every bit"
    axes.plot(
        steps[-1],
        result.validation_loss,
        "o",
        color=INK,
        ms=6,
        clip_on=False,
        label="held-out text",
    )
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_xlim(1, max(2, len(result.losses)))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
