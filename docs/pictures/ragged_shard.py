# SPDX-License-Identifier: Apache-2.0
"""Draw one matrix that four ranks share in four ways: ``python docs/pictures/ragged_shard.py``."""

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from style import COLORS, FAINT, INK, save

from vescale.dtensor import RaggedShard

ROWS, COLUMNS, RANKS = 8, 6, 4
EVEN = RaggedShard((0,), (1, 1, 1, 1))  # what Shard(0) does when the ranks divide the rows
ELEMENTS = RaggedShard((0, 1), (11, 15, 9, 13))
CUTS = (
    ("equal runs of rows", "Shard(0)", EVEN),
    ("unequal runs of rows", "RaggedShard((0,), (1, 4, 2, 1))", RaggedShard((0,), (1, 4, 2, 1))),
    ("any runs of elements", "RaggedShard((0, 1), (11, 15, 9, 13))", ELEMENTS),
    ("whole, on one rank", "RaggedShard((), (0, 0, 1, 0))", RaggedShard((), (0, 0, 1, 0))),
)


def draw_matrix(axes: Axes, ranges: list[tuple[int, int]]) -> None:
    """Color each element by its rank, and draw the borders between ranks as steps."""
    for rank, (start, end) in enumerate(ranges):
        for row in range(ROWS):
            left, right = max(start, row * COLUMNS), min(end, (row + 1) * COLUMNS)
            if left < right:
                corner = (left - row * COLUMNS, row)
                axes.add_patch(Rectangle(corner, right - left, 1, facecolor=COLORS[rank]))
    axes.hlines(range(1, ROWS), 0, COLUMNS, color="white", linewidth=1.2)
    axes.vlines(range(1, COLUMNS), 0, ROWS, color="white", linewidth=1.2)
    for _, end in ranges[:-1]:
        if 0 < end < ROWS * COLUMNS:
            row, column = divmod(end, COLUMNS)
            below = row + (column > 0)
            axes.plot(
                [0, column, column, COLUMNS], [below, below, row, row], color=INK, linewidth=2
            )
    axes.set(xlim=(0, COLUMNS), ylim=(ROWS, -1.5), aspect="equal")


def draw() -> Figure:
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.05)
    matrices, strips = figure.subplots(2, len(CUTS), height_ratios=(9.5, 1.5))
    for axes, strip, (meaning, name, placement) in zip(matrices, strips, CUTS, strict=True):
        ranges = [placement.split((ROWS, COLUMNS), rank) for rank in range(RANKS)]
        draw_matrix(axes, ranges)
        middle = {"x": COLUMNS / 2, "ha": "center"}
        axes.text(y=-0.95, s=meaning, fontsize=11, color=INK, **middle)
        axes.text(y=-0.3, s=name, fontsize=8, family="monospace", color=FAINT, **middle)
        for rank, (start, end) in enumerate(ranges):
            strip.add_patch(Rectangle((start, 0), end - start, 1, facecolor=COLORS[rank]))
            if 0 < end < ROWS * COLUMNS:
                strip.plot([end, end], [-0.3, 1.3], color=INK, linewidth=1.5)
        strip.set(xlim=(0, ROWS * COLUMNS), ylim=(-1.6, 1.4))
        axes.set_axis_off()
        strip.set_axis_off()
    strips[0].text(0, -1.4, "the same memory, laid flat", fontsize=9, color=FAINT)
    keys = [Patch(facecolor=COLORS[rank], label=f"rank {rank}") for rank in range(RANKS)]
    figure.legend(handles=keys, loc="outside lower center", ncols=RANKS, frameon=False)
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    save(draw(), __file__, folder)
