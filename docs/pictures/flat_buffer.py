# SPDX-License-Identifier: Apache-2.0
"""Draw what an all-gather delivers, tensor by tensor and from one planned buffer."""

import sys
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from style import COLORS, FAINT, INK, PADDING, save

from vescale.fsdp.planner import Request, plan

RANKS, COLUMNS, BLOCK = 4, 4, 2  # every matrix has 4 columns; blocks are 2 rows
MATRICES = (("wq", 10), ("wk", 6), ("wo", 18), ("w1", 26))  # name, rows
SPAN = 275  # elements across the picture


def interleaved() -> list[tuple[int, int, int | None]]:
    """Return (start, end, matrix) of a gather of padded Shard(0) pieces; None is padding."""
    pieces, at = [], 0
    for rank in range(RANKS):
        for matrix, (_, rows) in enumerate(MATRICES):
            chunk = -(-rows // RANKS)  # torch.chunk: the last ranks get less, and are padded
            held = min(max(rows - rank * chunk, 0), chunk)
            pieces.append((at, at + held * COLUMNS, matrix))
            pieces.append((at + held * COLUMNS, at + chunk * COLUMNS, None))
            at += chunk * COLUMNS
    return pieces


def planned() -> list[tuple[int, int, int | None]]:
    """Return the same for one planned buffer."""
    requests = [Request(name, rows * COLUMNS, BLOCK * COLUMNS) for name, rows in MATRICES]
    layout = plan(requests, RANKS)
    tensors = [
        (start, start + request.numel, matrix)
        for matrix, (start, request) in enumerate(zip(layout.offsets, requests, strict=True))
    ]
    return [(0, layout.buffer_numel, None), *tensors]


def draw_buffer(axes: Axes, pieces: list[tuple[int, int, int | None]], title: str) -> None:
    end = max(piece[1] for piece in pieces)
    shard = end // RANKS
    for start, stop, matrix in pieces:
        if start == stop:
            continue
        look = PADDING if matrix is None else {"facecolor": COLORS[matrix]}
        axes.add_patch(Rectangle((start, 0), stop - start, 1, **look))
        if matrix is None:
            continue
        cuts = [start, *range((start // shard + 1) * shard, stop, shard), stop]
        left, right = max(pairwise(cuts), key=lambda run: run[1] - run[0])
        if right - left > COLUMNS:  # wide enough to be named
            middle, name = (left + right) / 2, MATRICES[matrix][0]
            axes.text(middle, 0.5, name, ha="center", va="center", fontsize=9, color=INK)
    for rank in range(RANKS):
        middle = (rank + 0.5) * shard
        axes.text(middle, -0.5, f"from rank {rank}", ha="center", fontsize=9, color=FAINT)
    axes.vlines(range(0, end + 1, shard), -0.3, 1.3, color=INK, linewidth=1.8)
    axes.set(xlim=(-1, SPAN), ylim=(-0.7, 1.5))
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_axis_off()


def draw() -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    above, below = figure.subplots(2, 1)
    apart = "Each matrix cut on its own: every matrix arrives in pieces, and is copied together"
    draw_buffer(above, interleaved(), apart)
    together = (
        "One planned buffer: every matrix arrives whole, and the module uses it where it lies"
    )
    draw_buffer(below, planned(), together)
    keys = [
        Patch(facecolor=COLORS[matrix], label=f"{name} [{rows}, {COLUMNS}]")
        for matrix, (name, rows) in enumerate(MATRICES)
    ]
    keys.append(Patch(**PADDING, label="padding"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    save(draw(), __file__, folder)
