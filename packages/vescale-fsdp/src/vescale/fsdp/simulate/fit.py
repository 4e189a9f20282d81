# SPDX-License-Identifier: Apache-2.0
"""Whether a simulated run fits in the memory of a rank, by how much, and what would help."""

from collections.abc import Iterator, Sequence

import torch

from vescale.fsdp.inspect.layouts import readable
from vescale.fsdp.simulate import Simulation


def fits(simulation: Simulation, nbytes: int) -> bool:
    """Tell whether the peak of a rank, without activations, is at most ``nbytes``."""
    return simulation.peak_nbytes <= nbytes


def verdict(simulation: Simulation, nbytes: int) -> list[str]:
    """Return lines that say whether ``simulation`` fits in ``nbytes``, and else what helps."""
    room, memory = nbytes - simulation.peak_nbytes, readable(nbytes)
    if room >= 0:
        return [f"fits in {memory}: {readable(room)} are left for activations"]
    return [f"does not fit in {memory}: {readable(-room)} too much", *remedies(simulation, nbytes)]


def verdict_of_all(found: Sequence[Simulation], nbytes: int) -> list[str]:
    """Return lines that say that none of ``found`` fits, which is closest, and what helps."""
    closest = min(found, key=lambda one: one.peak_nbytes)
    setup, peak = closest.setup, closest.peak_nbytes
    layers = f"{setup.layers} {'layer' if setup.layers == 1 else 'layers'}"
    return [
        f"nothing fits in {readable(nbytes)}; the closest needs {readable(peak)}, "
        f"{readable(peak - nbytes)} too much:",
        f"{setup.ranks:,} ranks to a copy, units of {layers}, cut {cut_of(closest)}",
        *remedies(closest, nbytes),
    ]


def remedies(simulation: Simulation, nbytes: int) -> list[str]:
    """Return what would lessen the memory of a rank, the largest part first."""
    lasting = simulation.lasting_nbytes
    buffers = simulation.peak_nbytes - lasting
    largest = max(simulation.units, key=lambda cost: cost.reduced_nbytes).unit.name
    alone = ", too much on any number of ranks" if buffers > nbytes else ""
    parts = [
        (lasting, f"last from step to step; less with {_any_of(_for_lasting(simulation))}"),
        (
            buffers,
            f"are buffers of whole units, of {largest} the largest{alone};\n  less with "
            f"{_any_of(_for_buffers(simulation))}",
        ),
    ]
    return [f"- {readable(size)} {text}" for size, text in sorted(parts, reverse=True) if size]


def cut_of(simulation: Simulation) -> str:
    """Return the granularity, or for which optimizer it was chosen."""
    setup = simulation.setup
    return f"for {setup.optimizer}" if setup.granularity is None else str(setup.granularity)


def _for_lasting(simulation: Simulation) -> Iterator[str]:
    setup = simulation.setup
    yield "more ranks (--world)" if setup.replicas == 1 else "more ranks to a copy (--hsdp)"
    if setup.optimizer != "adamw8bit":
        yield "--optimizer adamw8bit"
    if setup.dtype == torch.float32:
        yield "--dtype bfloat16"


def _for_buffers(simulation: Simulation) -> Iterator[str]:
    setup = simulation.setup
    if setup.layers > 1:
        yield "fewer layers to a unit (--layers)"
    yield "its parts wrapped as units of their own"
    if setup.reduce_dtype == torch.float32:
        yield "--reduce-dtype bfloat16"


def _any_of(texts: Iterator[str]) -> str:
    *others, last = texts
    return f"{', '.join(others)}, or {last}" if others else last
