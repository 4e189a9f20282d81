# SPDX-License-Identifier: Apache-2.0
"""A simulation as text and as JSON."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from vescale.fsdp.inspect.layouts import readable
from vescale.fsdp.planner import SLICE_ALIGN_BYTES
from vescale.fsdp.simulate import Simulation, UnitCost
from vescale.fsdp.simulate.fit import cut_of, fits, verdict, verdict_of_all

COLUMNS = ("unit", "count", "elements", "lanes", "padding", "shard", "gathered", "reduced")
CHOICES = (
    *("ranks", "copies", "cut", "padding"),
    *("lasting", "peak", "within", "between", ""),
)


def report(model: str, simulation: Simulation, memory: int | None = None) -> str:
    """Return the tables of a simulation: its units, a rank's memory, and what to look at.

    ``model`` is a name to print. With a ``memory`` in bytes they say whether the run fits in it.
    """
    return "\n".join(
        [
            _setting(model, simulation),
            "",
            *aligned([COLUMNS, *map(_unit_row, simulation.units)]),
            "",
            f"{simulation.numel:,} elements, padding {simulation.padding:.2%}",
            "",
            *aligned([("memory of a rank", ""), *_memory_rows(simulation)]),
            *([] if memory is None else verdict(simulation, memory)),
            "",
            f"a rank receives {_received(simulation)};",
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


def choices(
    model: str, found: Sequence[Simulation], chosen: Sequence[Simulation], memory: int
) -> str:
    """Return a table of a search: ``chosen`` are marked, and what needs more than ``memory`` bytes.

    Where nothing fits it says so, and what would help.
    """
    marked = {id(one) for one in chosen}
    rows: list[tuple[str, ...]] = [CHOICES]
    for one in found:
        mark = "<-" if id(one) in marked else ""
        rows.append((*_choice(one), mark if fits(one, memory) else "too large"))
    head, *lines = aligned(rows)
    table = [head]
    pairs = zip(found, lines, strict=True)
    for layers, same in groupby(pairs, key=lambda pair: pair[0].setup.layers):
        table.append(f"units of {_layers(layers)}")
        table += [line for _, line in same]
    arrow = f"<-: the smallest group that needs at most {readable(memory)}."
    return "\n".join(
        [
            _setting(model, found[0], searched=True),
            "",
            *table,
            "",
            "ranks: that share a copy; lasting: parameters, gradients and optimizer state of a",
            "rank; peak: with the buffers of a step, without activations; within, between: what a",
            "rank receives in a step from its copy, and from others.",
            *([arrow] if chosen else ["", *verdict_of_all(found, memory)]),
        ]
    )


def as_dict(model: str, simulation: Simulation, memory: int | None = None) -> dict[str, Any]:
    """Return a simulation in plain types, for JSON. Sizes are in bytes of a rank.

    What there is nothing to say of is None: traffic where there is nobody to receive from, the
    padding of nothing, and without a ``memory`` in bytes whether the run fits in it.
    """
    setup = simulation.setup
    within, between = simulation.traffic_nbytes
    return {
        "model": model,
        "world_size": setup.world_size,
        "shards": setup.ranks,
        "replicas": setup.replicas,
        "granularity": cut_of(simulation),
        "optimizer": setup.optimizer,
        "layers_per_unit": setup.layers,
        "dtype": _name(setup.dtype),
        "param_dtype": _name(setup.param_dtype),
        "reduce_dtype": _name(setup.reduce_dtype),
        "elements": simulation.numel,
        "padding": simulation.padding if simulation.numel else None,
        "parameters": simulation.parameters_nbytes,
        "gradients": simulation.gradients_nbytes,
        "optimizer_state": simulation.optimizer_nbytes,
        "gathered_at_once": simulation.gathered_nbytes,
        "reduced_at_once": simulation.reduced_nbytes,
        "peak_without_activations": simulation.peak_nbytes,
        "memory": memory,
        "fits": None if memory is None else fits(simulation, memory),
        "received_within_copy": within if setup.ranks > 1 else None,
        "received_from_copies": between if setup.replicas > 1 else None,
        "align": SLICE_ALIGN_BYTES,
        "units": [
            {
                "name": cost.unit.name,
                "count": cost.unit.count,
                "elements": cost.plan.numel,
                "lanes": len(cost.plan.lanes),
                "padding": cost.plan.padding if cost.plan.numel else None,
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


def _setting(model: str, simulation: Simulation, *, searched: bool = False) -> str:
    setup = simulation.setup
    copies = f", {setup.replicas:,} copies over {setup.ranks:,} each" if setup.replicas > 1 else ""
    ranks = f"{setup.world_size:,} {'rank' if setup.world_size == 1 else 'ranks'}"
    chosen = "" if searched else f", cut {cut_of(simulation)}"
    return (
        f"{model} on {ranks}{'' if searched else copies}; {setup.optimizer}{chosen}; stored in "
        f"{_name(setup.dtype)}, gathered in {_name(setup.param_dtype)}, reduced in "
        f"{_name(setup.reduce_dtype)}"
    )


def _received(simulation: Simulation) -> str:
    setup = simulation.setup
    within, between = (readable(nbytes) for nbytes in simulation.traffic_nbytes)
    parts = [f"{within} a step from the ranks of its copy"] if setup.ranks > 1 else []
    parts += [f"{between} {'' if parts else 'a step '}from others"] if setup.replicas > 1 else []
    return ", ".join(parts) or "nothing: it is alone"


def _layers(number: int) -> str:
    return "1 layer" if number == 1 else f"{number} layers"


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
        f"{setup.ranks:,}",
        f"{setup.replicas:,}",
        cut_of(one),
        f"{one.padding:.2%}",
        readable(one.lasting_nbytes),
        readable(one.peak_nbytes),
        *map(readable, one.traffic_nbytes),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
