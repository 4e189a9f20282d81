# SPDX-License-Identifier: Apache-2.0
"""Try the group sizes, granularities and units that a model could be sharded with."""

from collections.abc import Sequence
from dataclasses import replace

from vescale.fsdp.granularity import Elements
from vescale.fsdp.simulate import Setup, Simulation, divisors, simulate
from vescale.fsdp.simulate.fit import fits
from vescale.fsdp.simulate.shapes import Unit

LAYERS = (1, 2, 4)  # to a unit
WORTH = 0.005  # the padding that another granularity must save to be shown


def search(units: Sequence[Unit], setup: Setup, layers: Sequence[int] = LAYERS) -> list[Simulation]:
    """Return a simulation of every choice: by layers of a unit, then by ranks that share a copy.

    Tried are so many ``layers`` to a unit, where that makes other units; the ``shards`` of
    ``setup``, or all numbers of ranks from 2 that divide the world; and the granularity of
    ``setup``. Where that is left open, cuts between any two elements follow if the optimizer takes
    them and they save padding.
    """
    found, seen = [], []
    groups = [setup.shards] if setup.shards else divisors(setup.world_size)[1:] or [1]
    for number in layers:
        merged = [part for unit in units for part in unit.merged(number)]
        if merged in seen:
            continue
        seen.append(merged)
        for ranks in groups:
            one = simulate(units, replace(setup, shards=ranks, layers=number))
            found.append(one)
            if setup.granularity is None and setup.optimizer != "adamw8bit":
                finer = simulate(units, replace(one.setup, granularity=Elements()))
                if finer.padding < one.padding - WORTH:
                    found.append(finer)
    return found


def smallest_that_fit(found: Sequence[Simulation], nbytes: int) -> list[Simulation]:
    """Return, for each number of layers, the first choice that needs at most ``nbytes``.

    That is the smallest group: fewer ranks wait for one another, perhaps within a host.
    """
    chosen: dict[int, Simulation] = {}
    for one in found:
        if fits(one, nbytes):
            chosen.setdefault(one.setup.layers, one)
    return list(chosen.values())
