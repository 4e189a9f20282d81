# SPDX-License-Identifier: Apache-2.0
"""Bytes of a rank's part of a planned unit: parameters, gradients and the optimizer's state."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from vescale.fsdp.lanes import AnyPlan
from vescale.fsdp.optim.split import split_params
from vescale.fsdp.simulate.shapes import Unit
from vescale.fsdp.tiles import Tiling, deserves_blocks

OPTIMIZERS = ("adamw", "muon", "adamw8bit")
FLOAT32 = torch.float32.itemsize
TILE = (32, 32)  # the default of AdamW8bit

# Bytes of state for so many elements of a parameter that a rank holds.
StateBytes = Callable[[int], int]


def state_nbytes(optimizer: str, unit: Unit, index: int, dtype: torch.dtype) -> StateBytes:
    """Return the function that tells the state of parameter ``index`` of ``unit``, in bytes.

    - adamw: two moments in the parameter's dtype.
    - muon: one for the hidden matrices that ``split_params`` finds, AdamW's two for the others.
    - adamw8bit: two codes of a byte an element and two float32 scales a tile where it has 8-bit
      state, two float32 moments elsewhere.

    Steps are left out: four bytes a parameter.
    """
    name, shape = unit.params[index]
    if optimizer == "adamw8bit":
        if not deserves_blocks(shape):
            return lambda numel: 2 * FLOAT32 * numel
        tiling = Tiling(shape, TILE)
        return lambda numel: 2 * (numel + FLOAT32 * tiling.bands(numel) * tiling.grid[1])
    moments = 1 if optimizer == "muon" and is_hidden_matrix(unit, name, shape) else 2
    return lambda numel: moments * dtype.itemsize * numel


def is_hidden_matrix(unit: Unit, name: str, shape: Sequence[int]) -> bool:
    """Tell whether ``split_params`` sends the parameter to Muon."""
    fqn = f"layers.0.{name}" if unit.count > 1 else name
    param = nn.Parameter(torch.empty(shape, device="meta"))
    return bool(split_params([(fqn, param)])[0])


def most(spans: Iterable[tuple[int, int, int]]) -> int:
    """Return the largest sum over the spans ``(first, ranks, value)`` that a rank is in."""
    changes: dict[int, int] = {}
    for first, ranks, value in spans:
        changes[first] = changes.get(first, 0) + value
        changes[first + ranks] = changes.get(first + ranks, 0) - value
    total = largest = 0
    for rank in sorted(changes):
        total += changes[rank]
        largest = max(largest, total)
    return largest


def spans_of(
    plan: AnyPlan, states: Sequence[StateBytes], count: int
) -> Iterable[tuple[int, int, int]]:
    """Yield ``(first rank, ranks, bytes of state)`` of every tensor in ``count`` equal units."""
    for index, state in enumerate(states):
        first = 0
        for numel, ranks in plan.shard_runs(index):
            if numel:
                yield first, ranks, count * state(numel)
            first += ranks
