# SPDX-License-Identifier: Apache-2.0
"""Padding of planned buffers beside the layout of Megatron-FSDP, on published model shapes.

    pip install --no-deps megatron-fsdp
    python benchmarks/planner_beside.py [--models llama3-70b gpt-oss-120b]

Both lay the tensors of one unit in a buffer of equal shards, and cut no row: a tensor's elements
under one index of its first dim, as Megatron-FSDP has it (of fused experts a row is an expert).
Megatron-FSDP's is the layout of its ``experimental.fully_shard``, whose shards are multiples of the
least common multiple of all rows. "rows of the last dim" is our default for fused experts, which
cuts between any two rows of an expert. Each number is the padding of the whole model in % of its
parameters: all units, as often as they occur. Needs no process group and no GPU.
"""

import argparse
import math
from collections.abc import Callable

from vescale.fsdp.granularity import Block, Rows
from vescale.fsdp.lanes import plan_lanes
from vescale.fsdp.planner import Request
from vescale.fsdp.simulate.shapes import Unit, shipped, shipped_units

WORLDS = (8, 64, 256, 1024)
ALIGN = 8  # elements of bfloat16 in 16 bytes


def theirs(unit: Unit, world_size: int) -> int:
    """Return the elements of Megatron-FSDP's buffer."""
    from megatron_fsdp.experimental.layout import GlobalLayout

    return GlobalLayout.build([shape for _, shape in unit.params], world_size).size


def ours(unit: Unit, world_size: int) -> int:
    """Return the elements of our buffer, or buffers, with cuts between indices of the first dim."""
    return _planned(unit, world_size, lambda shape: Rows(1))


def finer(unit: Unit, world_size: int) -> int:
    """Return the same with cuts between any two rows of the last dim."""
    return _planned(unit, world_size, lambda shape: Block(max(len(shape) - 1, 1), 1))


def _planned(unit: Unit, world_size: int, granularity: Callable) -> int:
    requests = [
        Request(name, math.prod(shape), granularity(shape).block_numel(shape))
        for name, shape in unit.params
    ]
    return world_size * plan_lanes(requests, world_size, align=ALIGN).shard_numel


def padding(model: str, world_size: int, layout: Callable[[Unit, int], int]) -> float:
    """Return the padding of the whole model in % of its parameters."""
    units = shipped_units(model)
    numel = sum(unit.count * sum(math.prod(shape) for _, shape in unit.params) for unit in units)
    return 100 * (sum(unit.count * layout(unit, world_size) for unit in units) / numel - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", choices=shipped(), nargs="+", default=shipped())
    models = parser.parse_args().models
    layouts = {"Megatron-FSDP": theirs, "ours": ours, "rows of the last dim": finer}
    print(f"{'padding, %':28}" + "".join(f"{f'{world} ranks':>14}" for world in WORLDS))
    for model in models:
        print(model)
        for name, layout in layouts.items():
            cells = (f"{padding(model, world, layout):>14.3f}" for world in WORLDS)
            print(f"  {name:26}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
