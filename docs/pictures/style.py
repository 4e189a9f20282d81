# SPDX-License-Identifier: Apache-2.0
"""One look for the pictures of the documentation, and files that do not change without reason."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0")  # told apart in grey and by the colour-blind
PADDING = {"facecolor": "#ffffff", "edgecolor": "#9a9a9a", "hatch": "////", "linewidth": 0.6}
INK, FAINT = "#222222", "#6b6b6b"


def save(figure: Figure, script: str, folder: Path) -> None:
    """Write the picture as SVG, for pages, and as PNG, for what cannot show SVG."""
    matplotlib.rcParams["svg.hashsalt"] = "vescale"  # equal ids in every run
    stem = folder / Path(script).stem.replace("_", "-")
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None}, facecolor="white")
    figure.savefig(stem.with_suffix(".png"), dpi=150, metadata={"Software": None})
