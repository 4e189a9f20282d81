# SPDX-License-Identifier: Apache-2.0
"""Draw a layout with matplotlib (the extra ``plot``): one bar per buffer.

In the bar are its lanes, and in each lane the ranks, side by side.
"""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vescale.fsdp.inspect.layouts import GroupLayout, Layout, TensorLayout, readable, title
from vescale.fsdp.lanes import AnyPlan

# Hues that colour-blind readers tell apart (Okabe and Ito), light enough for dark letters on them;
# the second line repeats them paler for groups of many tensors.
COLOURS = (
    *("#7cc4ec", "#f0b95a", "#5cbf9b", "#dba0c0", "#efe585", "#6a9fd4", "#e58a55", "#b3b3b3"),
    *("#c2e2f5", "#f8dfb2", "#b4e0d0", "#efd3e1", "#f8f3c8", "#bad2ec", "#f4cdb6", "#dcdcdc"),
)
INK, FAINT, PAPER = "#22262b", "#80868c", "#ffffff"
PADDING: dict[str, Any] = {
    "facecolor": "#f7f7f7",
    "edgecolor": "#b9bec3",
    "hatch": "/////",
    "linewidth": 0,
}
WIDTH, LEFT, BARS, TOP, ROW, LEGEND = 11.0, 2.1, 7.2, 0.85, 0.62, 0.24  # inches
NAMES = 0.16  # more of a row where each has the names of its ranks
BAR_HEIGHT = 0.56  # of a row
LETTER = 0.0085  # width of a letter in a bar, as a part of the bar
LEGEND_COLUMNS, MOST_RANK_NAMES = 5, 16
LEAST_SHARD = 0.006  # part of a bar: boundaries of narrower shards would run into one another

Scale = list[tuple[Fraction, Fraction]]


def draw(layout: Layout, path: str | Path) -> None:
    """Write a picture of ``layout`` to ``path``; needs no display and changes no global state."""
    runs = layout.runs()
    names = dict.fromkeys(t.name for run in runs for t in run[0].tensors if t.numel)
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    scales = [_scale(run[0].plan) for run in runs]
    bars = (ROW if scales[1:] == scales[:-1] else ROW + NAMES) * max(1, len(runs))
    below = LEGEND * -(-(len(colours) + 1) // LEGEND_COLUMNS) + 0.25
    height = TOP + bars + below
    figure = Figure(figsize=(WIDTH, height), facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((LEFT / WIDTH, below / height, BARS / WIDTH, bars / height))
    axes.set_xlim(0, 1)
    axes.set_ylim(max(1, len(runs)) - 0.5, -0.5)
    axes.set_axis_off()
    for row, run in enumerate(runs):
        _draw_buffer(axes, row, run[0], colours)
        _draw_captions(axes, row, run)
        if not row or scales[row] != scales[row - 1]:  # others share the names above
            _draw_rank_names(axes, row, run[0].plan.world_size, scales[row])
    figure.text(LEFT / WIDTH, 1 - 0.22 / height, layout.summary(), **_text(11, "left"))
    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    handles.append(Patch(**PADDING, label="padding"))
    figure.legend(
        handles=handles, loc="lower center", ncols=LEGEND_COLUMNS, fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=150)


def _draw_buffer(axes: Axes, row: int, group: GroupLayout, colours: dict[str, str]) -> None:
    whole, world_size = max(1, group.plan.buffer_numel), group.plan.world_size
    # Padding is what the tensors leave uncovered.
    axes.barh(row, 1, BAR_HEIGHT, **PADDING)
    for tensor in group.tensors:
        if tensor.numel:
            left, width = tensor.offset / whole, tensor.numel / whole
            colour = colours[tensor.name]
            axes.barh(row, width, BAR_HEIGHT, left, color=colour, edgecolor=PAPER, linewidth=0.6)
            _draw_label(axes, row, tensor, group)
    for _, shard_numel, start, _ in group.plan.lane_ranges:
        step = 1 if shard_numel / whole >= LEAST_SHARD else world_size
        for rank in range(0, world_size + 1, step):
            inner = 0 < rank < world_size
            reach = 0.4 if inner else BAR_HEIGHT / 2
            x = [(start + rank * shard_numel) / whole] * 2
            width = 1.4 if inner else 0.8
            axes.plot(x, [row - reach, row + reach], color=INK, lw=width, clip_on=False)


def _draw_label(axes: Axes, row: int, tensor: TensorLayout, group: GroupLayout) -> None:
    # In the tensor's largest piece, where no rank boundary crosses the letters.
    sizes = tensor.shard_sizes
    rank = max(tensor.ranks, key=sizes.__getitem__)
    whole = group.plan.buffer_numel
    before = sum(sizes[:rank])  # elements of the tensor on earlier ranks, which lie in front
    left = (tensor.offset + before) / whole
    width = sizes[rank] / whole
    for label in labels(tensor.name):
        if len(label) * LETTER < width:
            axes.text(left + width / 2, row, label, **_text(7.5, "center"))
            return


def labels(name: str) -> list[str]:
    """Return what may stand for a parameter, the longest first; a number alone says nothing."""
    short = name.removesuffix(".weight")
    return [text for text in (short, short.rpartition(".")[2]) if not text.isdecimal()] or [name]


def _draw_captions(axes: Axes, row: int, run: tuple[GroupLayout, ...]) -> None:
    group = run[0]
    kind = str(group.param_dtype).removeprefix("torch.")
    kind += "" if group.trainable else ", frozen"
    lanes = len(group.plan.lane_ranges)
    kind += f", {lanes} lanes" if lanes > 1 else ""
    kind += f", {len(run)} alike" if len(run) > 1 else ""
    name = title(run).partition(" (")[0] if len(run) > 1 else title(run)
    for x, align, above, below in (
        (-0.012, "right", name, kind),
        (1.012, "left", f"{readable(group.nbytes_per_rank)} per rank", _padding(group)),
    ):
        axes.text(x, row - 0.13, above, **_text(9, align))
        axes.text(x, row + 0.19, below, **_text(7.5, align, FAINT))


def _scale(plan: AnyPlan) -> Scale:
    """Return where each lane begins and how long a rank's part of it is, as parts of the bar."""
    whole = max(1, plan.buffer_numel)
    return [(Fraction(at, whole), Fraction(numel, whole)) for _, numel, at, _ in plan.lane_ranges]


def _draw_rank_names(axes: Axes, row: int, world_size: int, scale: Scale) -> None:
    """Name the ranks over each lane of a row that is wide enough for it."""
    for start, shard in scale:
        names, step = rank_names(world_size, float(shard))
        for place, name in enumerate(names):
            x = float(start + (place * step + Fraction(1, 2)) * shard)
            axes.text(x, row - 0.5, name, **_text(7.5, "center", FAINT))


def rank_names(world_size: int, shard: float) -> tuple[list[str], int]:
    """Return the names over a lane, and how many ranks further each is; ``shard`` is a part of 1.

    The same step for all, so that the names do not touch; none where the lane is too narrow.
    """
    last = len(str(world_size - 1))
    if world_size <= MOST_RANK_NAMES and shard >= LETTER * (last + len("rank  ")):
        return [f"rank {rank}" for rank in range(world_size)], 1
    needed = LETTER * (last + 1)
    if world_size * shard < needed:
        return [], 1
    step = max(-(-world_size // MOST_RANK_NAMES), math.ceil(needed / shard))
    return [str(rank) for rank in range(0, world_size, step)], step


def _padding(group: GroupLayout) -> str:
    return f"padding {group.plan.padding:.2%}" if group.plan.padding_numel else "no padding"


def _text(fontsize: float, align: str, colour: str = INK) -> dict[str, Any]:
    return {"fontsize": fontsize, "ha": align, "va": "center", "color": colour}
