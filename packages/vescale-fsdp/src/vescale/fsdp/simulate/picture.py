# SPDX-License-Identifier: Apache-2.0
"""Draw a simulation with matplotlib (the extra ``plot``): padding, one buffer, and memory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vescale.fsdp.inspect.layouts import readable
from vescale.fsdp.picture import COLOURS, FAINT, INK, LEAST_SHARD, PADDING, PAPER
from vescale.fsdp.simulate import Setup, Simulation, UnitCost, simulate
from vescale.fsdp.simulate.shapes import Unit

MOST_NAMES = 12  # in the legend of a buffer
LEAST_PADDING = 1e-4  # drawn for less, on a logarithmic axis: 0.01 %
MEMORY = (
    ("parameters", "parameters_nbytes"),
    ("gradients", "gradients_nbytes"),
    ("optimizer state", "optimizer_nbytes"),
    ("gathered", "gathered_nbytes"),
    ("being reduced", "reduced_nbytes"),
)


def draw(model: str, units: Sequence[Unit], simulation: Simulation, path: str | Path) -> None:
    """Write a picture of ``simulation``, which is one of ``units``, to ``path``.

    ``model`` is the name in its title.
    """
    figure = Figure(figsize=(11, 8.2), facecolor=PAPER)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2, 2, height_ratios=(1, 0.85), hspace=0.42, wspace=0.26, left=0.08, right=0.97, top=0.9
    )
    _draw_padding(figure.add_subplot(grid[0, 0]), units, simulation.setup)
    _draw_memory(figure.add_subplot(grid[0, 1]), units, simulation.setup)
    largest = max(simulation.units, key=lambda cost: cost.unit.count * cost.plan.numel)
    _draw_buffer(figure.add_subplot(grid[1, :]), largest)
    setup = simulation.setup
    ranks = f"{setup.world_size:,} {'rank' if setup.world_size == 1 else 'ranks'}"
    title = f"{model}: {simulation.numel:,} elements on {ranks}, {setup.optimizer}"
    figure.suptitle(title, x=0.08, y=0.965, ha="left", fontsize=13, color=INK)
    figure.savefig(path, dpi=150)


def worlds(setup: Setup) -> list[int]:
    """Return numbers of ranks to compare: powers of two up to the world, and the world."""
    powers = [2**power for power in range(1, 15) if 1.5 * 2**power < setup.ranks]
    return [*powers, setup.ranks]


def _at(units: Sequence[Unit], setup: Setup, ranks: int) -> Simulation:
    return simulate(units, replace(setup, world_size=ranks, shards=ranks))


def _draw_padding(axes: Axes, units: Sequence[Unit], setup: Setup) -> None:
    ranks = worlds(setup)
    choices: tuple[tuple[Any, str, str], ...] = (
        (1, "one buffer", COLOURS[1]),
        ("auto", "lanes", COLOURS[5]),
    )
    for lanes, label, colour in choices:
        values = [_at(units, replace(setup, lanes=lanes), n).padding for n in ranks]
        shown = [100 * max(value, LEAST_PADDING) for value in values]
        axes.plot(ranks, shown, "o-", color=colour, label=label, ms=4, lw=1.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(
        ranks, [f"{n:,}" for n in ranks], rotation=45 if len(ranks) > 6 else 0, fontsize=7.5
    )
    axes.minorticks_off()
    axes.set_xlabel("ranks that share a copy", fontsize=9, color=INK)
    axes.set_title("padding, % of all elements", loc="left", fontsize=10, color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(frameon=False, fontsize=8)
    _plain(axes)


def _draw_memory(axes: Axes, units: Sequence[Unit], setup: Setup) -> None:
    ranks = worlds(setup)[-5:]
    found = [_at(units, setup, n) for n in ranks]
    below = [0.0] * len(ranks)
    gib = 2**30
    for (label, name), colour in zip(MEMORY, (COLOURS[i] for i in (0, 2, 1, 5, 6)), strict=True):
        heights = [getattr(one, name) / gib for one in found]
        axes.bar(range(len(ranks)), heights, 0.62, below, color=colour, label=label)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    for place, total in enumerate(below):
        if total:
            text = readable(round(total * gib))
            axes.text(place, total, text, ha="center", va="bottom", fontsize=7.5, color=INK)
    axes.set_ylim(0, 1.3 * max(below) or 1)
    axes.set_xticks(range(len(ranks)), [f"{n:,}" for n in ranks], fontsize=8)
    axes.set_xlabel("ranks that share a copy", fontsize=9, color=INK)
    axes.set_title("GiB of a rank, without activations", loc="left", fontsize=10, color=INK)
    axes.legend(frameon=False, fontsize=7.5, ncols=3, loc="upper left")
    _plain(axes)


def _draw_buffer(axes: Axes, cost: UnitCost) -> None:
    """Draw the lanes of a unit below one another, each as wide as its buffer."""
    plan, shapes = cost.plan, dict(cost.unit.params)
    largest = sorted(range(len(plan.requests)), key=lambda i: -plan.requests[i].numel)
    named = {
        index: COLOURS[place]
        for place, index in enumerate(largest[:MOST_NAMES])
        if plan.requests[index].numel
    }
    whole = max(numel for *_, numel in plan.lane_ranges) or 1
    for row, (_, shard, start, numel) in enumerate(plan.lane_ranges):
        axes.barh(row, numel / whole, 0.6, **PADDING)
        for index, (request, offset) in enumerate(zip(plan.requests, plan.offsets, strict=True)):
            if request.numel and start <= offset < start + numel:
                left, width = (offset - start) / whole, request.numel / whole
                axes.barh(row, width, 0.6, left, color=named.get(index, COLOURS[-1]), lw=0)
        if shard / whole >= LEAST_SHARD:
            edges = [rank * shard / whole for rank in range(plan.world_size + 1)]
            axes.vlines(edges, row - 0.36, row + 0.36, color=INK, lw=0.9)
        lane = f"lane {row}: " if len(plan.lanes) > 1 else ""
        text = f"{lane}{plan.world_size:,} ranks x {shard:,} elements"
        axes.text(0, row - 0.42, text, fontsize=8, color=FAINT, va="bottom")
    axes.set_ylim(len(plan.lane_ranges) - 0.4, -0.75)
    axes.set_xlim(0, 1)
    axes.set_axis_off()
    kind = "one buffer" if len(plan.lanes) == 1 else f"{len(plan.lanes)} lanes"
    axes.set_title(
        f"unit {cost.unit.name}: {kind}, padding {plan.padding:.2%}",
        loc="left",
        fontsize=10,
        color=INK,
    )
    names = {index: plan.requests[index].fqn for index in named}
    handles = [
        Patch(facecolor=named[index], label=f"{name} {list(shapes[name])}")
        for index, name in names.items()
    ]
    others = sum(1 for request in plan.requests if request.numel) - len(named)
    if others:
        handles.append(Patch(facecolor=COLOURS[-1], label=f"{others:,} others"))
    handles.append(Patch(**PADDING, label="padding"))
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 0.02),
        ncols=3,
        fontsize=7.5,
        frameon=False,
    )


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=FAINT, labelsize=8)
