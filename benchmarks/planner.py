# SPDX-License-Identifier: Apache-2.0
"""Padding and planning time, in one buffer and in lanes, on published model shapes.

Prints three tables: whole models with k-row blocks on every matrix; single layers with blocks on
feed-forward and expert matrices only; and cuts between any two elements. "lanes" is the least
padding with up to three lanes, whatever they cost; "default" is what ``plan_lanes`` chooses, which
counts a lane as ``LANE_NBYTES`` bytes of a shard, and the number of its lanes. The last columns are
milliseconds of CPU for the slowest unit: one buffer, and the default with all it needs. Exits with
1 if a target of padding is missed. Needs no process group and no GPU:

    python benchmarks/planner.py [--models llama3 gpt-oss]
"""

import argparse
import math
import time
from dataclasses import dataclass

from vescale.fsdp import lanes, planner
from vescale.fsdp.granularity import Block, Elements
from vescale.fsdp.lanes import LanePlan, plan_lanes
from vescale.fsdp.planner import Request, plan
from vescale.fsdp.simulate.shapes import Unit, shipped, shipped_units

ALIGN = 8  # elements of bfloat16 in 16 bytes
SINGLE_MS, LANES_MS = 50, 300  # targets of time, for one unit

# Padding in % of a model's elements, at WORLDS ranks: (model, rows per block) -> one buffer, lanes.
WORLDS = (64, 256, 1024, 10240)
WHOLE_MODEL = {
    ("llama3-70b", 1): ((0.36, 1.19, 2.87, 36.26), (0.06, 0.00, 0.02, 12.48)),
    ("llama3-70b", 32): ((9.53, 9.58, 116.11, 2038.24), (1.92, 5.77, 100.89, 1277.30)),
    ("llama3-70b", 128): ((9.58, 116.11, 755.30, 8452.96), (5.77, 100.89, 450.92, 5409.20)),
    ("deepseek-v3-671b-unfused", 1): ((0.01, 0.11, 1.24, 26.82), (0.00, 0.02, 0.04, 1.00)),
    ("deepseek-v3-671b-unfused", 32): ((0.70, 3.83, 26.77, 747.98), (0.03, 0.19, 3.52, 38.81)),
    ("deepseek-v3-671b-unfused", 128): ((1.65, 9.93, 41.89, 1318.93), (0.04, 3.09, 12.95, 211.63)),
    ("deepseek-v3-671b-fused", 1): ((0.01, 0.11, 1.24, 26.82), (0.00, 0.02, 0.04, 1.00)),
    ("deepseek-v3-671b-fused", 32): ((0.70, 9.63, 110.30, 1026.40), (0.03, 0.19, 5.12, 38.81)),
    ("deepseek-v3-671b-fused", 128): ((1.65, 37.77, 190.39, 2803.87), (0.04, 5.12, 12.95, 211.63)),
    ("gpt-oss-120b", 1): ((0.01, 0.05, 5.68, 17.33), (0.01, 0.05, 0.05, 2.26)),
    ("gpt-oss-120b", 32): ((0.23, 1.34, 87.24, 1762.73), (0.05, 0.61, 4.14, 59.29)),
    ("gpt-oss-120b", 128): ((1.34, 5.82, 110.67, 2000.22), (0.61, 5.82, 22.52, 304.53)),
    ("qwen3-235b-a22b-fused", 1): ((0.02, 0.15, 0.15, 1.16), (0.02, 0.15, 0.15, 1.16)),
    ("qwen3-235b-a22b-fused", 32): ((0.15, 5.19, 29.37, 223.14), (0.15, 0.33, 7.90, 48.72)),
    ("qwen3-235b-a22b-fused", 128): ((1.17, 29.37, 29.71, 1192.54), (1.17, 7.90, 18.98, 414.39)),
    ("kimi-k2-1t-unfused", 1): ((0.00, 0.00, 0.02, 3.73), (0.00, 0.00, 0.02, 0.50)),
    ("kimi-k2-1t-unfused", 32): ((0.07, 0.39, 2.33, 246.46), (0.02, 0.02, 0.79, 14.32)),
    ("kimi-k2-1t-unfused", 128): ((0.18, 0.91, 10.37, 499.69), (0.02, 0.20, 7.50, 90.52)),
}

# The same of one layer, the most over LAYER_WORLDS.
LAYER_WORLDS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 768, 1024)
FEED_FORWARD = {
    ("gpt-oss-120b", 1): (0.091, 0.091),
    ("gpt-oss-120b", 16): (2.799, 0.734),
    ("gpt-oss-120b", 128): (17.485, 5.736),
    ("deepseek-v3-671b-unfused", 1): (0.016, 0.016),
    ("deepseek-v3-671b-unfused", 16): (0.272, 0.272),
    ("deepseek-v3-671b-unfused", 32): (0.381, 0.381),
    ("deepseek-v3-671b-unfused", 128): (2.641, 1.950),
    ("deepseek-v3-671b-fused", 128): (14.304, 8.473),
}
ELEMENT_WISE = 0.026  # % of one layer, every model, up to 10240 ranks


@dataclass(frozen=True, slots=True)
class Cell:
    """Padding in % of one buffer, of lanes, and of the default; its lanes; ms of CPU."""

    single: float
    lanes: float
    default: float
    count: int
    single_ms: float
    default_ms: float

    @staticmethod
    def most(cells: "list[Cell]") -> "Cell":
        """Return the most of each value."""
        return Cell(*(max(getattr(cell, name) for cell in cells) for name in Cell.__slots__))


def requests(unit: Unit, rows: int, *, only: str = "") -> list[Request]:
    """Return the unit's tensors with blocks of ``rows`` rows of the last dim.

    ``rows=0`` cuts anywhere, and so are 1-D tensors cut, and those without ``only`` in the name.
    """
    result = []
    for name, shape in unit.params:
        blocked = rows and len(shape) > 1 and only in name
        granularity = Block(len(shape) - 1, rows) if blocked else Elements()
        result.append(Request(name, math.prod(shape), granularity.block_numel(shape)))
    return result


def shards(tensors: list[Request], world_size: int) -> tuple[int, LanePlan, LanePlan, Cell]:
    """Return the shard size of one buffer, the plan of least padding, the default, and times."""
    forget()
    start = time.process_time()
    single = plan(tensors, world_size, align=ALIGN)
    single_ms = 1000 * (time.process_time() - start)
    default = plan_lanes(tensors, world_size, align=ALIGN)
    default_ms = 1000 * (time.process_time() - start)
    least = plan_lanes(tensors, world_size, align=ALIGN, lane_nbytes=0)
    times = Cell(0.0, 0.0, 0.0, len(default.lanes), single_ms, default_ms)
    return single.shard_numel, least, default, times


def forget() -> None:
    """Empty the planner's caches, so that what follows is timed from scratch."""
    planner._layout.cache_clear()
    lanes._divide.cache_clear()


def whole_model(model: str, rows: int, world_size: int) -> Cell:
    """Return the padding in % of the model, and the most lanes and time of a unit."""
    numel = 0
    totals, times = [0, 0, 0], []
    for unit in shipped_units(model):
        tensors = requests(unit, rows)
        single, least, default, cell = shards(tensors, world_size)
        numel += unit.count * sum(tensor.numel for tensor in tensors)
        for at, shard in enumerate((single, least.shard_numel, default.shard_numel)):
            totals[at] += unit.count * world_size * shard
        times.append(cell)
    slowest = Cell.most(times)
    paddings = (100 * (total / numel - 1) for total in totals)
    return Cell(*paddings, slowest.count, slowest.single_ms, slowest.default_ms)


def one_layer(
    model: str, rows: int, worlds: tuple[int, ...], *, only: str = "mlp", layer: str = "layer"
) -> Cell:
    """Return the most padding over ``worlds`` in % of a layer, and the most lanes and time."""
    tensors = requests(next(u for u in shipped_units(model) if u.name == layer), rows, only=only)
    numel = sum(tensor.numel for tensor in tensors)
    cells = []
    for world_size in worlds:
        single, least, default, cell = shards(tensors, world_size)
        paddings = (
            100 * (world_size * shard / numel - 1)
            for shard in (single, least.shard_numel, default.shard_numel)
        )
        cells.append(Cell(*paddings, cell.count, cell.single_ms, cell.default_ms))
    return Cell.most(cells)


class Report:
    """Prints rows as they are reached, and counts the targets met and missed."""

    def __init__(self) -> None:
        self.met, self.missed, self.cells = 0, [], []

    def title(self, text: str) -> None:
        """Print a title and the columns' names."""
        print(f"\n{text}\n{'':<34}{'one buffer':>10}{'target':>10}{'':3}{'lanes':>9}{'target':>10}")
        print(f"{'':76}{'default':>10} (lanes){'ms':>7}{'ms':>7}")

    def row(self, name: str, cell: Cell, targets: tuple[float, float], *, digits: int) -> None:
        """Print one comparison; targets are rounded to so many ``digits``."""
        self.cells.append(cell)
        text = f"{name:<34}"
        for kind, reached, target in zip(
            ("one buffer", "lanes"), (cell.single, cell.lanes), targets, strict=True
        ):
            met = round(reached, digits) <= target
            self.met += met
            self.missed += [] if met else [f"{name}, {kind}"]
            text += f"{reached:>10.3f}{target:>10.{digits}f} {'+' if met else 'MISSED'} "
        text += f"{cell.default:>19.3f} ({cell.count})    "
        print(text + f"{cell.single_ms:>7.1f}{cell.default_ms:>7.1f}")

    def summary(self) -> None:
        """Print what was met and missed, and the times."""
        print(f"\n{self.met} targets met, {len(self.missed)} missed: {self.missed}")
        for name, limit in (("single_ms", SINGLE_MS), ("default_ms", LANES_MS)):
            times = sorted(getattr(cell, name) for cell in self.cells)
            over = sum(value > limit for value in times)
            print(f"{name}: slowest {times[-1]:.0f}; {over} of {len(times)} rows over {limit}")


def main() -> int:
    """Print the tables; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[""], help="prefixes of model names")
    prefixes = tuple(parser.parse_args().models)
    report = Report()
    report.title("Whole model, padding in %, blocks on every matrix (rows @ ranks)")
    for (model, rows), targets in WHOLE_MODEL.items():
        for world_size, *pair in zip(WORLDS, *targets, strict=True):
            if model.startswith(prefixes):
                cell = whole_model(model, rows, world_size)
                report.row(f"{model} {rows} @ {world_size}", cell, tuple(pair), digits=2)
    report.title(f"One layer, most padding in % over {len(LAYER_WORLDS)} sizes, expert blocks only")
    for (model, rows), pair in FEED_FORWARD.items():
        if model.startswith(prefixes):
            report.row(f"{model} {rows}", one_layer(model, rows, LAYER_WORLDS), pair, digits=3)
    report.title("One layer, most padding in % up to 10240 ranks, cut at any element")
    for model in shipped():
        if model.startswith(prefixes):
            cell = one_layer(model, 0, (*LAYER_WORLDS, 10240))
            report.row(model, cell, (ELEMENT_WISE, ELEMENT_WISE), digits=3)
    report.summary()
    return int(bool(report.missed))


if __name__ == "__main__":
    raise SystemExit(main())
