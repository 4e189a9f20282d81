# SPDX-License-Identifier: Apache-2.0
"""Bytes of a rank's part of a planned unit: parameters, gradients and the optimizer's state."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from vescale.fsdp.lanes import AnyPlan
from vescale.fsdp.optim.blocks import RowBlock, block_pieces
from vescale.fsdp.optim.roots import Piece, plan_roots
from vescale.fsdp.optim.soap_blocks import (
    BLOCK_SIZE,
    FREQUENCY,
    bands_of,
    matrix_of,
    state_numel,
)
from vescale.fsdp.optim.split import split_params
from vescale.fsdp.simulate.shapes import Unit
from vescale.fsdp.tiles import Tiling, deserves_blocks

OPTIMIZERS = ("adamw", "muon", "adamw8bit", "soap")
HIDDEN_MOMENTS = {"muon": 1, "soap": 0}  # of a hidden matrix, in the parameter's dtype
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
    - soap: AdamW's two where it has none, and none of the hidden matrices: ``soap_spans`` has them.

    Steps are left out: four bytes a parameter.
    """
    name, shape = unit.params[index]
    if optimizer == "adamw8bit":
        if not deserves_blocks(shape):
            return lambda numel: 2 * FLOAT32 * numel
        tiling = Tiling(shape, TILE)
        return lambda numel: 2 * (numel + FLOAT32 * tiling.bands(numel) * tiling.grid[1])
    moments = 2
    if optimizer in HIDDEN_MOMENTS and is_hidden_matrix(unit, name, shape):
        moments = HIDDEN_MOMENTS[optimizer]
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


def soap_spans(units: Iterable[tuple[Unit, AnyPlan]], ranks: int) -> Iterable[tuple[int, int, int]]:
    """Yield ``(first rank, ranks, bytes of state)`` of every band of the hidden matrices.

    SOAP chooses a root for each band, of all matrices together, and the root holds the state,
    whoever holds the band. A matrix without elements has its state on every rank.
    """
    matrices, states = [], []
    for unit, plan in units:
        bands = [
            (band, pieces)
            for index, (name, shape) in enumerate(unit.params)
            if is_hidden_matrix(unit, name, shape)
            for band, pieces in _bands(shape, plan, index)
        ]
        cut = [(band, pieces) for band, pieces in bands if pieces]
        matrices += [matrix_of(*one, BLOCK_SIZE, FREQUENCY) for one in cut] * unit.count
        states += [FLOAT32 * state_numel(band, BLOCK_SIZE) for band, _ in cut] * unit.count
        for band, pieces in bands:
            if not pieces:
                yield 0, ranks, unit.count * FLOAT32 * state_numel(band, BLOCK_SIZE)
    for root, state in zip(plan_roots(matrices, ranks).roots, states, strict=True):
        yield root, 1, state


def _bands(
    shape: tuple[int, ...], plan: AnyPlan, index: int
) -> Iterable[tuple[RowBlock, tuple[Piece, ...]]]:
    bands = bands_of(shape, BLOCK_SIZE)
    return zip(bands, block_pieces(bands, plan.shard_runs(index)), strict=True)
