# SPDX-License-Identifier: Apache-2.0
"""What a model costs on a number of ranks, from shapes alone: no process group, no memory.

``python -m vescale.fsdp plan`` prints it. Sizes are in bytes of one rank, except where a name says
elements.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Literal

import torch

from vescale.fsdp.granularity import Granularity, resolve_granularity
from vescale.fsdp.lanes import LanePlan, check_lanes, plan_lanes
from vescale.fsdp.padding_cause import PaddingCause, padding_causes
from vescale.fsdp.planner import Request, slice_align
from vescale.fsdp.presets import granularity_for
from vescale.fsdp.simulate.memory import OPTIMIZERS, most, soap_spans, spans_of, state_nbytes
from vescale.fsdp.simulate.shapes import Unit, shipped, units_of
from vescale.fsdp.slices import Slices, flags_numel

__all__ = ["Setup", "Simulation", "UnitCost", "shipped", "simulate", "units_of"]


@dataclass(frozen=True)
class Setup:
    """How a model is to be wrapped and trained.

    ``shards`` ranks of the ``world_size`` share one copy of the model; the others repeat it. None:
    all. Without a ``granularity`` it is what ``granularity_for(optimizer)`` gives. Parameters,
    gradients and states are stored in ``dtype``, gathered in ``param_dtype`` and reduced in
    ``reduce_dtype``. Each unit has ``layers`` layers.

    Raises ValueError for what does not fit together.
    """

    world_size: int
    shards: int | None = None
    granularity: Granularity | None = None
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    lanes: int | Literal["auto"] = "auto"
    layers: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1.")
        if self.shards is not None and (self.shards < 1 or self.world_size % self.shards):
            raise ValueError(
                f"shards={self.shards} does not divide the {self.world_size} ranks; pass one of "
                f"{divisors(self.world_size)}."
            )
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r}, expected one of {OPTIMIZERS}.")
        check_lanes(self.lanes)

    @property
    def ranks(self) -> int:
        """Ranks that share one copy."""
        return self.shards or self.world_size

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.world_size // self.ranks

    @property
    def align(self) -> int:
        """What a shard's elements are a multiple of: 16 bytes in each of the dtypes."""
        narrowest = min(d.itemsize for d in (self.dtype, self.param_dtype, self.reduce_dtype))
        return slice_align(narrowest)


@dataclass(frozen=True)
class UnitCost:
    """One kind of unit: what each of ``unit.count`` such costs a rank."""

    unit: Unit
    setup: Setup
    plan: LanePlan

    @property
    def shard_nbytes(self) -> int:
        """The sharded parameters, and as much their gradients."""
        return self.plan.shard_numel * self.setup.dtype.itemsize

    @property
    def gathered_nbytes(self) -> int:
        """The buffer of the full parameters: what one gather fills."""
        return self.plan.buffer_numel * self.setup.param_dtype.itemsize

    @property
    def reduced_nbytes(self) -> int:
        """The buffer of the full gradients, which one reduction takes, flags included."""
        numel = Slices(self.plan, flags_numel(self.plan)).full_numel
        return numel * self.setup.reduce_dtype.itemsize

    @property
    def traffic_nbytes(self) -> tuple[int, int]:
        """Bytes that a rank receives in a step: of its own copy in two gathers and a reduction, and
        of the others in an all-reduce of its part, sent twice around as in a ring."""
        ranks, replicas = self.setup.ranks, self.setup.replicas
        within = (2 * self.gathered_nbytes + self.reduced_nbytes) * (ranks - 1) // ranks
        between = 2 * (self.reduced_nbytes // ranks) * (replicas - 1) // replicas
        return within, between

    def causes(self) -> tuple[PaddingCause, ...]:
        """Return the tensors that force padding of over 10 %."""
        return padding_causes(self.plan)


@dataclass(frozen=True)
class Simulation:
    """A model's units under one setup."""

    setup: Setup
    units: tuple[UnitCost, ...]

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(cost.unit.count * cost.plan.numel for cost in self.units)

    @cached_property
    def padding(self) -> float:
        """Padding of all buffers over ``numel``."""
        total = sum(cost.unit.count * cost.plan.padding_numel for cost in self.units)
        return total / self.numel if self.numel else 0.0

    @cached_property
    def parameters_nbytes(self) -> int:
        """The sharded parameters of a rank, padding included."""
        return sum(cost.unit.count * cost.shard_nbytes for cost in self.units)

    @property
    def gradients_nbytes(self) -> int:
        """Their gradients: the flags that travel with them included."""
        flags = sum(cost.unit.count * flags_numel(cost.plan) for cost in self.units)
        return self.parameters_nbytes + flags * self.setup.dtype.itemsize

    @cached_property
    def optimizer_nbytes(self) -> int:
        """The optimizer's state on the rank that has most of it. States have no padding."""
        return most(self._spans())

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        for cost in self.units:
            states = [
                state_nbytes(self.setup.optimizer, cost.unit, index, self.setup.dtype)
                for index in range(len(cost.unit.params))
            ]
            yield from spans_of(cost.plan, states, cost.unit.count)
        if self.setup.optimizer == "soap":
            yield from soap_spans([(c.unit, c.plan) for c in self.units], self.setup.ranks)

    @cached_property
    def gathered_nbytes(self) -> int:
        """Full parameters at once: of a unit, and of the next one, which is gathered ahead."""
        return self._two_at_once("gathered_nbytes")

    @cached_property
    def reduced_nbytes(self) -> int:
        """Full gradients at once: of a unit, and of the one before, which is being reduced."""
        return self._two_at_once("reduced_nbytes")

    def _two_at_once(self, name: str) -> int:
        sizes = [getattr(cost, name) for cost in self.units for _ in range(min(cost.unit.count, 2))]
        return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))

    @property
    def lasting_nbytes(self) -> int:
        """What lives from step to step: parameters, gradients and the optimizer's state."""
        return self.parameters_nbytes + self.gradients_nbytes + self.optimizer_nbytes

    @property
    def peak_nbytes(self) -> int:
        """With the buffers of a step; activations, which sharding does not change, are left out."""
        return self.lasting_nbytes + self.gathered_nbytes + self.reduced_nbytes

    @cached_property
    def traffic_nbytes(self) -> tuple[int, int]:
        """Bytes that a rank receives in a step: within its copy, and from the others."""
        every = [(cost.unit.count, cost.traffic_nbytes) for cost in self.units]
        within, between = (sum(n * nbytes[i] for n, nbytes in every) for i in (0, 1))
        return within, between


def simulate(units: Sequence[Unit], setup: Setup) -> Simulation:
    """Plan every unit under ``setup`` as ``fully_shard`` does, and count."""
    merged = [part for unit in units for part in unit.merged(setup.layers)]
    return Simulation(setup, tuple(_cost(unit, setup) for unit in merged))


def _cost(unit: Unit, setup: Setup) -> UnitCost:
    granularity = setup.granularity or granularity_for(setup.optimizer)
    requests = []
    for name, shape in unit.params:
        chosen = resolve_granularity(granularity, name, SimpleNamespace(shape=shape))
        block = chosen.block_numel(shape, fqn=name)
        requests.append(Request(name, math.prod(shape), block))
    plan = plan_lanes(
        requests,
        setup.ranks,
        align=setup.align,
        lanes=setup.lanes,
        itemsize=setup.param_dtype.itemsize,
    )
    return UnitCost(unit, setup, plan)


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number``, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
