# SPDX-License-Identifier: Apache-2.0
"""A simulation as text and as JSON."""

from collections.abc import Sequence
from typing import Any

import torch

from vescale.fsdp.inspect import readable
from vescale.fsdp.planner import SLICE_ALIGN_BYTES
from vescale.fsdp.simulate import Setup, Simulation, UnitCost

COLUMNS = ("unit", "count", "elements", "lanes", "padding", "shard", "gathered", "reduced")
CHOICES = (
    *("layers", "ranks", "copies", "cut", "padding"),
    *("lasting", "peak", "within", "between", ""),
)


def report(simulation: Simulation) -> str:
    """Return the tables of a simulation: its units, a rank's memory, and what to look at."""
    within, between = (readable(nbytes) for nbytes in simulation.traffic_nbytes)
    return "\n".join(
        [
            _setting(simulation.setup),
            "",
            *aligned([COLUMNS, *map(_unit_row, simulation.units)]),
            "",
            f"{simulation.numel:,} elements, padding {simulation.padding:.2%}",
            "",
            *aligned([("memory of a rank", ""), *_memory_rows(simulation)]),
            "",
            f"a rank receives {within} a step from the ranks of its copy, {between} from others;",
            f"slices of a buffer begin on multiples of {SLICE_ALIGN_BYTES} bytes",
            *(f"warning: {text}" for text in warnings(simulation)),
        ]
    )


def warnings(simulation: Simulation) -> list[str]:
    """Return a sentence for each kind of unit that one tensor pads by more than 10 %."""
    found = []
    for cost in simulation.units:
        for cause in cost.causes():
            others = len(cause.fqns) - 1
            names = cause.fqns[0] + (f" and {others} like it" if others else "")
            found.append(
                f"unit {cost.unit.name}: blocks of {cause.block:,} elements in {names} force "
                f"{cause.padding:.0%} of padding; cut finer (--granularity), share a copy between "
                "fewer ranks (--hsdp), or see --search"
            )
    return found


def choices(found: Sequence[Simulation], chosen: Sequence[Simulation], nbytes: int) -> str:
    """Return a table of a search: ``chosen`` are marked, and what needs more than ``nbytes``."""
    marked = {id(one) for one in chosen}
    rows = [CHOICES]
    for one in found:
        mark = "<-" if id(one) in marked else ""
        rows.append((*_choice(one), "too large" if one.peak_nbytes > nbytes else mark))
    return "\n".join(
        [
            *aligned(rows),
            "",
            "layers: of a unit; ranks: that share a copy; lasting: parameters, gradients and",
            "optimizer state of a rank; peak: with the buffers of a step, without activations;",
            "within, between: what a rank receives in a step from its copy, and from others.",
            f"<-: the smallest group that needs at most {readable(nbytes)}.",
        ]
    )


def as_dict(simulation: Simulation) -> dict[str, Any]:
    """Return a simulation in plain types, for JSON. Sizes are in bytes of a rank."""
    setup = simulation.setup
    within, between = simulation.traffic_nbytes
    return {
        "world_size": setup.world_size,
        "shards": setup.ranks,
        "replicas": setup.replicas,
        "granularity": _cut(setup),
        "optimizer": setup.optimizer,
        "layers_per_unit": setup.layers,
        "dtype": _name(setup.dtype),
        "param_dtype": _name(setup.param_dtype),
        "reduce_dtype": _name(setup.reduce_dtype),
        "elements": simulation.numel,
        "padding": simulation.padding,
        "parameters": simulation.parameters_nbytes,
        "gradients": simulation.gradients_nbytes,
        "optimizer_state": simulation.optimizer_nbytes,
        "gathered_at_once": simulation.gathered_nbytes,
        "reduced_at_once": simulation.reduced_nbytes,
        "peak_without_activations": simulation.peak_nbytes,
        "received_within_copy": within,
        "received_from_copies": between,
        "align": SLICE_ALIGN_BYTES,
        "units": [
            {
                "name": cost.unit.name,
                "count": cost.unit.count,
                "elements": cost.plan.numel,
                "lanes": len(cost.plan.lanes),
                "padding": cost.plan.padding,
                "shard": cost.shard_nbytes,
                "gathered": cost.gathered_nbytes,
                "reduced": cost.reduced_nbytes,
            }
            for cost in simulation.units
        ],
        "warnings": warnings(simulation),
    }


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _setting(setup: Setup) -> str:
    copies = f", {setup.replicas:,} copies over {setup.ranks:,} each" if setup.replicas > 1 else ""
    return (
        f"{setup.world_size:,} ranks{copies}; {setup.optimizer}, cut {_cut(setup)}; stored in "
        f"{_name(setup.dtype)}, gathered in {_name(setup.param_dtype)}, reduced in "
        f"{_name(setup.reduce_dtype)}"
    )


def _unit_row(cost: UnitCost) -> tuple[str, ...]:
    return (
        cost.unit.name,
        f"{cost.unit.count}",
        f"{cost.plan.numel:,}",
        f"{len(cost.plan.lanes)}",
        f"{cost.plan.padding:.2%}",
        readable(cost.shard_nbytes),
        readable(cost.gathered_nbytes),
        readable(cost.reduced_nbytes),
    )


def _memory_rows(simulation: Simulation) -> list[tuple[str, str]]:
    rows = (
        ("parameters", simulation.parameters_nbytes),
        ("gradients", simulation.gradients_nbytes),
        ("optimizer state, at most", simulation.optimizer_nbytes),
        ("gathered at once", simulation.gathered_nbytes),
        ("gradients being reduced", simulation.reduced_nbytes),
        ("sum, without activations", simulation.peak_nbytes),
    )
    return [(name, readable(nbytes)) for name, nbytes in rows]


def _choice(one: Simulation) -> tuple[str, ...]:
    setup = one.setup
    return (
        f"{setup.layers}",
        f"{setup.ranks:,}",
        f"{setup.replicas:,}",
        _cut(setup),
        f"{one.padding:.2%}",
        readable(one.lasting_nbytes),
        readable(one.peak_nbytes),
        *map(readable, one.traffic_nbytes),
    )


def _cut(setup: Setup) -> str:
    return f"for {setup.optimizer}" if setup.granularity is None else str(setup.granularity)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
