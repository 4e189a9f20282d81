# SPDX-License-Identifier: Apache-2.0
"""``python -m vescale.fsdp plan``: what a model costs on a number of ranks, without them."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from vescale.fsdp.granularity import FORMS, parse_granularity
from vescale.fsdp.simulate import Setup, Simulation, shipped, simulate, units_of
from vescale.fsdp.simulate.fit import fits
from vescale.fsdp.simulate.memory import OPTIMIZERS
from vescale.fsdp.simulate.report import as_dict, choices, report
from vescale.fsdp.simulate.search import LAYERS, search, smallest_that_fit
from vescale.fsdp.simulate.shapes import Unit, name_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIB = 2**30
MEMORY = 80.0  # GiB of a rank that a search goes by


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0; 1 where nothing fits in the memory that was given, or is searched for; 2 for what cannot be
    planned.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return _plan(given)
    except (ValueError, OSError) as error:
        print(f"{parser.prog} plan: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vescale.fsdp", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="plan")
    plan = commands.add_parser(
        "plan",
        help="padding, memory and traffic of a model on a number of ranks",
        description="Print padding, memory and traffic of a model on a number of ranks. Needs no "
        "process group, no GPU and no weights.",
        epilog="Exit status: 0; 1 where it does not fit in --memory; 2 for what cannot be "
        f"planned. Known models: {', '.join(shipped())}.",
    )
    plan.add_argument(
        "model",
        help="a known model, such as Llama-3-70B; a JSON file of shapes, {fqn: [sizes]}; or a "
        "folder with a config.json of Hugging Face Transformers",
    )
    plan.add_argument("--world", type=int, required=True, help="number of ranks")
    plan.add_argument(
        "--hsdp",
        type=int,
        metavar="RANKS",
        help="ranks that share one copy (default: all; with --search: any)",
    )
    plan.add_argument(
        "--granularity",
        type=_granularity,
        help=f"where matrices may be cut: {FORMS} (default: as the optimizer wants)",
    )
    plan.add_argument("--optimizer", type=str.lower, choices=OPTIMIZERS, default="adamw")
    plan.add_argument(
        "--layers", type=int, help="layers of one unit (default: 1; with --search: 1, 2 and 4)"
    )
    plan.add_argument("--lanes", type=_lanes, default="auto", help="1, 2, 3 or auto (default)")
    for name, default, what in (
        ("dtype", "float32", "stored"),
        ("param-dtype", "bfloat16", "gathered"),
        ("reduce-dtype", "float32", "reduced"),
    ):
        plan.add_argument(f"--{name}", choices=DTYPES, default=default, help=f"{what} dtype")
    plan.add_argument("--search", action="store_true", help="try group sizes, units and cuts")
    plan.add_argument(
        "--memory",
        type=_memory,
        metavar="GIB",
        help=f"of a rank: say whether it fits (default for --search: {MEMORY:g})",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--plot", metavar="FILE", help="draw it too: png, svg or pdf")
    return parser


def _plan(given: argparse.Namespace) -> int:
    name, units = name_of(given.model), units_of(given.model)
    setup = Setup(
        given.world,
        shards=given.hsdp,
        granularity=given.granularity,
        optimizer=given.optimizer,
        dtype=DTYPES[given.dtype],
        param_dtype=DTYPES[given.param_dtype],
        reduce_dtype=DTYPES[given.reduce_dtype],
        lanes=given.lanes,
        layers=1 if given.layers is None else given.layers,
    )
    chosen = simulate(units, setup)
    if given.plot:
        _draw(name, units, chosen, given.plot)
    if given.search:
        return _search(name, units, setup, given)
    memory = None if given.memory is None else round(given.memory * GIB)
    if given.json:
        print(json.dumps(as_dict(name, chosen, memory), indent=1))
    else:
        print(report(name, chosen, memory))
    return 0 if memory is None or fits(chosen, memory) else 1


def _search(name: str, units: Sequence[Unit], setup: Setup, given: argparse.Namespace) -> int:
    found = search(units, setup, LAYERS if given.layers is None else [given.layers])
    memory = round((MEMORY if given.memory is None else given.memory) * GIB)
    fitting = smallest_that_fit(found, memory)
    if given.json:
        every = [
            {**as_dict(name, one, memory), "smallest_that_fits": one in fitting} for one in found
        ]
        print(json.dumps(every, indent=1))
    else:
        print(choices(name, found, fitting, memory))
    return 0 if fitting else 1


def _draw(name: str, units: Sequence[Unit], chosen: Simulation, path: str) -> None:
    try:
        from vescale.fsdp.simulate.picture import draw
    except ImportError as error:
        raise ValueError(
            f"--plot draws with matplotlib, which cannot be imported ({error}); install it with: "
            'pip install "vescale-fsdp[plot]"'
        ) from error
    draw(name, units, chosen, path)


def _granularity(text: str) -> Any:
    try:
        return parse_granularity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _memory(text: str) -> float:
    try:
        memory = float(text)
    except ValueError:
        memory = 0.0
    if not 0 < memory < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}, expected the GiB of a rank, such as 80")
    return memory


def _lanes(text: str) -> int | str:
    return text if text == "auto" or not text.isdecimal() else int(text)


if __name__ == "__main__":
    raise SystemExit(main())
