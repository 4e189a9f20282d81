# SPDX-License-Identifier: Apache-2.0
"""Draw the losses that ``benchmarks/optimizers.py --json`` found, from the file beside this one."""

import json
import sys
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from style import COLORS, FAINT, INK, save

WINDOW = 10  # steps that one point is the mean of


def main() -> None:
    found = json.loads(Path(__file__).with_suffix(".json").read_text())["losses"]
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    styles = ("-", "--", "-", "-")  # AdamW8bit lies on AdamW
    for (name, losses), color, style in zip(found.items(), COLORS, styles, strict=True):
        means = [fmean(losses[max(0, at - WINDOW + 1) : at + 1]) for at in range(len(losses))]
        axes.plot(range(1, len(means) + 1), means, style, color=color, label=name, linewidth=1.6)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(f"loss, mean of {WINDOW} steps", color=INK)
    axes.tick_params(colors=FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure, __file__, Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)


if __name__ == "__main__":
    main()
