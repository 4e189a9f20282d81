# SPDX-License-Identifier: Apache-2.0
"""Padding and planning time of the single-buffer planner on published model shapes.

Prints three tables: whole models with k-row blocks on every matrix; single layers with blocks on
feed-forward and expert matrices only; and cuts between any two elements. Each cell is what the
planner reaches, what it has to reach, and the lower bound of its search. Exits with 1 if a target
is missed. Needs no process group and no GPU:

    python benchmarks/planner.py [--models llama3 gpt-oss]
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vescale.fsdp.granularity import Block, Elements
from vescale.fsdp.packing import Group
from vescale.fsdp.planner import Request, plan
from vescale.fsdp.shard_search import lower_bound, search_layout

SHAPES = Path(__file__).parent / "model_shapes"
ALIGN = 8  # elements of bfloat16 in 16 bytes

# Padding in % of a model's elements: (model, rows per block) -> at 64, 256, 1024, 10240 ranks.
WORLDS = (64, 256, 1024, 10240)
WHOLE_MODEL = {
    ("llama3-70b", 1): (0.36, 1.19, 2.87, 36.26),
    ("llama3-70b", 32): (9.53, 9.58, 116.11, 2038.24),
    ("llama3-70b", 128): (9.58, 116.11, 755.30, 8452.96),
    ("deepseek-v3-671b-unfused", 1): (0.01, 0.11, 1.24, 26.82),
    ("deepseek-v3-671b-unfused", 32): (0.70, 3.83, 26.77, 747.98),
    ("deepseek-v3-671b-unfused", 128): (1.65, 9.93, 41.89, 1318.93),
    ("deepseek-v3-671b-fused", 1): (0.01, 0.11, 1.24, 26.82),
    ("deepseek-v3-671b-fused", 32): (0.70, 9.63, 110.30, 1026.40),
    ("deepseek-v3-671b-fused", 128): (1.65, 37.77, 190.39, 2803.87),
    ("gpt-oss-120b", 1): (0.01, 0.05, 5.68, 17.33),
    ("gpt-oss-120b", 32): (0.23, 1.34, 87.24, 1762.73),
    ("gpt-oss-120b", 128): (1.34, 5.82, 110.67, 2000.22),
    ("qwen3-235b-a22b-fused", 1): (0.02, 0.15, 0.15, 1.16),
    ("qwen3-235b-a22b-fused", 32): (0.15, 5.19, 29.37, 223.14),
    ("qwen3-235b-a22b-fused", 128): (1.17, 29.37, 29.71, 1192.54),
    ("kimi-k2-1t-unfused", 1): (0.00, 0.00, 0.02, 3.73),
    ("kimi-k2-1t-unfused", 32): (0.07, 0.39, 2.33, 246.46),
    ("kimi-k2-1t-unfused", 128): (0.18, 0.91, 10.37, 499.69),
}

# Padding in % of one layer, the most over LAYER_WORLDS: (model, rows per block) -> %.
LAYER_WORLDS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 768, 1024)
FEED_FORWARD = {
    ("gpt-oss-120b", 1): 0.091,
    ("gpt-oss-120b", 16): 2.799,
    ("gpt-oss-120b", 128): 17.485,
    ("deepseek-v3-671b-unfused", 1): 0.016,
    ("deepseek-v3-671b-unfused", 16): 0.272,
    ("deepseek-v3-671b-unfused", 32): 0.381,
    ("deepseek-v3-671b-unfused", 128): 2.641,
    ("deepseek-v3-671b-fused", 128): 14.304,
}
ELEMENT_WISE = 0.026  # % of one layer, every model, up to 10240 ranks


@dataclass(frozen=True, slots=True)
class Unit:
    """One group of parameters and how many of it the model has: names and shapes in order."""

    name: str
    count: int
    params: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A planned unit: shard size reached, lower bound of the search, seconds of CPU it took."""

    shard_numel: int
    bound: int
    seconds: float


def models() -> list[str]:
    """Return the names of the shape files, sorted."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


@cache
def units(model: str) -> tuple[Unit, ...]:
    """Return the units of a model with all repeated parameters written out."""
    data = json.loads((SHAPES / f"{model}.json").read_text())
    return tuple(
        Unit(unit["unit"], unit["count"], tuple(_expand(unit["params"]))) for unit in data["units"]
    )


def _expand(entries: list) -> Iterator[tuple[str, tuple[int, ...]]]:
    for entry in entries:
        if isinstance(entry, dict):
            for number in range(entry["repeat"]):
                prefix = entry["name"].format(i=number)
                for suffix, shape in entry["params"]:
                    yield prefix + suffix, tuple(shape)
        else:
            yield entry[0], tuple(entry[1])


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


def outcome(tensors: list[Request], world_size: int) -> Outcome:
    """Plan from scratch, timed, and check that the public, cached and validated plan agrees."""
    sizes = [(tensor.numel, min(tensor.block, tensor.numel)) for tensor in tensors]
    start = time.process_time()
    _, shard = search_layout(sizes, world_size, ALIGN)
    seconds = time.process_time() - start
    if plan(tensors, world_size, align=ALIGN).shard_numel != shard:
        raise RuntimeError("plan() and search_layout() disagree; one of them is not deterministic.")
    return Outcome(shard, lower_bound(Group.of(sizes, world_size, ALIGN)), seconds)


def whole_model(model: str, rows: int, world_size: int) -> tuple[float, float, float]:
    """Return padding and its lower bound in % of the model, and the slowest unit's seconds."""
    numel = reached = bound = 0
    slowest = 0.0
    for unit in units(model):
        tensors = requests(unit, rows)
        found = outcome(tensors, world_size)
        numel += unit.count * sum(tensor.numel for tensor in tensors)
        reached += unit.count * world_size * found.shard_numel
        bound += unit.count * world_size * found.bound
        slowest = max(slowest, found.seconds)
    return 100 * (reached / numel - 1), 100 * (bound / numel - 1), slowest


def one_layer(
    model: str, rows: int, worlds: tuple[int, ...], *, only: str = "mlp", layer: str = "layer"
) -> tuple[float, float, float]:
    """Return the largest padding over ``worlds`` in % of a layer, its bound, most seconds."""
    tensors = requests(next(u for u in units(model) if u.name == layer), rows, only=only)
    numel = sum(tensor.numel for tensor in tensors)
    worst = bound = slowest = 0.0
    for world_size in worlds:
        found = outcome(tensors, world_size)
        padding = 100 * (world_size * found.shard_numel / numel - 1)
        if padding > worst:
            worst, bound = padding, 100 * (world_size * found.bound / numel - 1)
        slowest = max(slowest, found.seconds)
    return worst, bound, slowest


class Report:
    """Prints rows as they are reached, and counts the targets missed."""

    def __init__(self) -> None:
        self.missed, self.slowest = 0, 0.0

    def title(self, text: str) -> None:
        """Print a title and the columns' names."""
        print(f"\n{text}\n{'':<34}{'reached':>10}{'target':>10}{'bound':>10}{'CPU ms':>8}")

    def row(
        self, name: str, cells: tuple[float, float, float], target: float, *, digits: int
    ) -> None:
        """Print one comparison; targets are rounded to so many ``digits``."""
        reached, bound, seconds = cells
        missed = round(reached, digits) > target
        self.missed += missed
        self.slowest = max(self.slowest, seconds)
        print(
            f"{name:<34}{reached:>10.3f}{target:>10.{digits}f}{bound:>10.3f}{1000 * seconds:>8.1f}"
            + ("  MISSED" if missed else "")
        )


def main() -> int:
    """Print the tables; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[""], help="prefixes of model names")
    prefixes = tuple(parser.parse_args().models)
    report = Report()
    report.title("Whole model, padding in %, blocks on every matrix (rows @ ranks)")
    for (model, rows), targets in WHOLE_MODEL.items():
        for world_size, target in zip(WORLDS, targets, strict=True):
            if model.startswith(prefixes):
                cells = whole_model(model, rows, world_size)
                report.row(f"{model} {rows} @ {world_size}", cells, target, digits=2)
    report.title(f"One layer, most padding in % over {len(LAYER_WORLDS)} sizes, expert blocks only")
    for (model, rows), target in FEED_FORWARD.items():
        if model.startswith(prefixes):
            cells = one_layer(model, rows, LAYER_WORLDS)
            report.row(f"{model} {rows}", cells, target, digits=3)
    report.title("One layer, most padding in % up to 10240 ranks, cut at any element")
    for model in models():
        if model.startswith(prefixes):
            cells = one_layer(model, 0, (*LAYER_WORLDS, 10240))
            report.row(model, cells, ELEMENT_WISE, digits=3)
    print(f"\n{report.missed} targets missed; slowest unit {1000 * report.slowest:.0f} CPU ms")
    return int(report.missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
