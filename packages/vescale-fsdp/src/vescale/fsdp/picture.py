# SPDX-License-Identifier: Apache-2.0
"""Draw a layout with matplotlib (the extra ``plot``): one bar per buffer.

In the bar are its lanes, and in each lane the ranks, side by side.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vescale.fsdp.inspect import GroupLayout, Layout, TensorLayout, readable, title

# Hues that colour-blind readers tell apart (Okabe and Ito), light enough for dark letters on them;
# the second line repeats them paler for groups of many tensors.
COLOURS = (
    *("#7cc4ec", "#f0b95a", "#5cbf9b", "#dba0c0", "#efe585", "#6a9fd4", "#e58a55", "#b3b3b3"),
    *("#c2e2f5", "#f8dfb2", "#b4e0d0", "#efd3e1", "#f8f3c8", "#bad2ec", "#f4cdb6", "#dcdcdc"),
)
INK, FAINT, PAPER = "#22262b", "#80868c", "#ffffff"
PADDING = {"facecolor": "#f7f7f7", "edgecolor": "#b9bec3", "hatch": "/////", "linewidth": 0}
WIDTH, LEFT, BARS, TOP, ROW, LEGEND = 11.0, 2.1, 7.2, 0.85, 0.62, 0.24  # inches
BAR_HEIGHT = 0.56  # of a row
LETTER = 0.0085  # width of a letter in a bar, as a part of the bar
LEGEND_COLUMNS, MOST_RANK_NAMES = 5, 16


def draw(layout: Layout, path: str | Path) -> None:
    """Write a picture of ``layout`` to ``path``; needs no display and changes no global state."""
    runs = layout.runs()
    names = dict.fromkeys(tensor.name for run in runs for tensor in run[0].tensors)
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    bars = ROW * max(1, len(runs))
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
    _draw_rank_names(axes, layout)
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
        for rank in range(world_size + 1):
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
    name = tensor.name.removesuffix(".weight")
    for label in (name, name.rpartition(".")[2]):
        if len(label) * LETTER < width:
            axes.text(left + width / 2, row, label, **_text(7.5, "center"))
            return


def _draw_captions(axes: Axes, row: int, run: tuple[GroupLayout, ...]) -> None:
    group = run[0]
    kind = str(group.param_dtype).removeprefix("torch.")
    kind += "" if group.trainable else ", frozen"
    kind += f", {len(run)} alike" if len(run) > 1 else ""
    name = title(run).partition(" (")[0] if len(run) > 1 else title(run)
    for x, align, above, below in (
        (-0.012, "right", name, kind),
        (1.012, "left", f"{readable(group.nbytes_per_rank)} per rank", _padding(group)),
    ):
        axes.text(x, row - 0.13, above, **_text(9, align))
        axes.text(x, row + 0.19, below, **_text(7.5, align, FAINT))


def _draw_rank_names(axes: Axes, layout: Layout) -> None:
    worlds = {group.plan.world_size for group in layout.groups}
    lanes = {len(group.plan.lane_ranges) for group in layout.groups}
    if len(worlds) != 1 or lanes != {1}:
        return  # groups on meshes of their own, or with ranks once in each lane: no common scale
    (world_size,) = worlds
    prefix = "rank " if world_size <= MOST_RANK_NAMES else ""
    for rank in range(0, world_size, -(-world_size // MOST_RANK_NAMES)):
        axes.text((rank + 0.5) / world_size, -0.62, f"{prefix}{rank}", **_text(9, "center", FAINT))


def _padding(group: GroupLayout) -> str:
    return f"padding {group.plan.padding:.2%}" if group.plan.padding_numel else "no padding"


def _text(fontsize: float, align: str, colour: str = INK) -> dict[str, object]:
    return {"fontsize": fontsize, "ha": align, "va": "center", "color": colour}
