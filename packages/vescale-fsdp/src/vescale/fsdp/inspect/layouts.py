# SPDX-License-Identifier: Apache-2.0
"""Layouts: tables of where every parameter of a wrapped model lies.

A layout is read from the plans of the model's parameter groups: no communication, no copy, the same
answer on every rank. Offsets and sizes are in elements, except where a name says bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat, takewhile
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from vescale.fsdp.lanes import AnyPlan

COLUMNS = ("parameter", "shape", "numel", "block", "offset", "ranks")
TEXT_COLUMNS = 2  # these stand left, the numbers after them right


class Group(Protocol):
    """What a layout needs to know of a parameter group."""

    name: str
    dtype: torch.dtype

    @property
    def plan(self) -> AnyPlan: ...

    @property
    def param_dtype(self) -> torch.dtype | None: ...

    @property
    def trainable(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One parameter in its group's buffer.

    ``name`` is the FQN without the unit's own, or all of it where the unit has several modules.
    ``shape`` is that of the whole parameter, and ``numel`` counts what tensor or expert parallelism
    leaves of it to the group. No rank boundary cuts a run of ``block`` elements; ``shard_runs``
    says how many elements the ranks hold, as pairs ``(numel, ranks)`` in rank order.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    block: int
    offset: int
    shard_runs: tuple[tuple[int, int], ...]

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """How many elements each rank holds: [world_size], made when it is asked for."""
        return tuple(chain.from_iterable(repeat(numel, ranks) for numel, ranks in self.shard_runs))

    @property
    def ranks(self) -> range:
        """The ranks that hold at least one element; consecutive, as a tensor is one interval."""
        empty = takewhile(lambda run: not run[0], self.shard_runs)
        first = sum(ranks for _, ranks in empty)
        return range(first, first + sum(ranks for numel, ranks in self.shard_runs if numel))


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The buffer of one group: the parameters of a unit that share dtype and trainability.

    ``dtype`` is the stored one; ``param_dtype`` is the one that is gathered and computed in.
    """

    unit: str
    dtype: torch.dtype
    param_dtype: torch.dtype
    trainable: bool
    plan: AnyPlan
    tensors: tuple[TensorLayout, ...]

    @property
    def nbytes_per_rank(self) -> int:
        """Bytes of one rank's shard as stored, padding included."""
        return self.plan.shard_numel * self.dtype.itemsize

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the whole buffer as gathered, padding included."""
        return self.plan.buffer_numel * self.param_dtype.itemsize

    def like(self, other: "GroupLayout") -> bool:
        """Return whether both differ in the name of the unit at most."""
        mine, theirs = (
            (g.tensors, g.dtype, g.param_dtype, g.trainable, g.plan.lane_ranges, g.plan.world_size)
            for g in (self, other)
        )
        return mine == theirs


@dataclass(frozen=True, slots=True)
class Layout:
    """The buffers of a model, its units in the order of ``named_modules``.

    ``str()`` is a plain table, and rich prints a coloured one; both show consecutive units with the
    same layout, such as the blocks of a transformer, once.
    """

    groups: tuple[GroupLayout, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(group.plan.numel for group in self.groups)

    @property
    def nbytes_per_rank(self) -> int:
        """Bytes of one rank's shards as stored, padding included."""
        return sum(group.nbytes_per_rank for group in self.groups)

    @property
    def padding(self) -> float:
        """Elements of all buffers that belong to no parameter, over ``numel``."""
        padding = sum(group.plan.padding_numel for group in self.groups)
        return padding / self.numel if self.numel else 0.0

    def runs(self) -> tuple[tuple[GroupLayout, ...], ...]:
        """Return the groups, consecutive ones with the same layout put together."""
        runs: list[list[GroupLayout]] = []
        for group in self.groups:
            if runs and group.like(runs[-1][0]):
                runs[-1].append(group)
            else:
                runs.append([group])
        return tuple(map(tuple, runs))

    def __str__(self) -> str:
        tables = [(run, [COLUMNS, *map(_cells, run[0].tensors)]) for run in self.runs()]
        columns = zip(*(row for _, rows in tables for row in rows), strict=True)
        widths = [max(map(len, column)) for column in columns]
        lines = []
        for run, rows in tables:
            lines.append(f"{title(run)}: {_facts(run[0])}")
            lines += ["  " + _aligned(row, widths) for row in rows] + [""]
        return "\n".join([*lines, self.summary()])

    def __rich__(self) -> Any:
        from rich.console import Group as Stack
        from rich.table import Table
        from rich.text import Text

        parts: list[Any] = []
        for run in self.runs():
            table = Table(
                title=Text.assemble((title(run), "bold cyan"), f"\n{_facts(run[0])}"),
                title_justify="left",
            )
            for position, name in enumerate(COLUMNS):
                table.add_column(name, justify="left" if position < TEXT_COLUMNS else "right")
            for tensor in run[0].tensors:
                table.add_row(*map(Text, _cells(tensor)))
            parts += [table, ""]
        return Stack(*parts, Text(self.summary(), style="bold"))

    def summary(self) -> str:
        """Return one line: groups, elements, bytes per rank and padding of the whole model."""
        if not self.groups:
            return (
                "Nothing is sharded: no parameter here belongs to a module that fully_shard of "
                "vescale.fsdp wrapped. Call fully_shard on the blocks of the model and on the "
                "model, then look again."
            )
        noun = "group" if len(self.groups) == 1 else "groups"
        return (
            f"{len(self.groups)} {noun}, {self.numel:,} elements, "
            f"{readable(self.nbytes_per_rank)} per rank, padding {self.padding:.2%}"
        )


def layout(model: nn.Module) -> Layout:
    """Return where every parameter of ``model``, wrapped with ``fully_shard``, lies.

    Works in any state, sharded or gathered; a model that is not wrapped has an empty layout.
    """
    from vescale.fsdp.units import param_groups  # the runtime; a layout itself needs only plans

    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module.")
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    return layout_of_groups(param_groups(model), shapes)


def layout_of_groups(
    groups: Iterable[Group], shapes: Mapping[str, Sequence[int]] | None = None
) -> Layout:
    """Return the layout of parameter groups; ``shapes`` maps FQNs to global shapes.

    A parameter without a known shape is shown flat, as ``(numel,)``.
    """
    return Layout(tuple(_group_layout(group, shapes or {}) for group in groups))


def plot(model: nn.Module | Layout, path: str | Path) -> None:
    """Draw the layout of ``model`` to ``path``; the suffix (png, svg, pdf) says the format.

    One bar per buffer, cut where a rank's shard ends: one colour per parameter, padding hatched.
    Consecutive units with the same layout share a bar. Raises ImportError without matplotlib.
    """
    try:
        from vescale.fsdp.picture import draw
    except ImportError as error:
        raise ImportError(
            f"inspect.plot draws with matplotlib, which cannot be imported ({error}); "
            'install it with: pip install "vescale-fsdp[plot]"'
        ) from error
    if not isinstance(path, (str, PathLike)):
        raise TypeError(f"path is a {type(path).__name__}, expected the name of a file.")
    draw(model if isinstance(model, Layout) else layout(model), path)


def title(run: Sequence[GroupLayout]) -> str:
    """Return the name of a run of units: one unit's FQN, or the first and last of several."""
    first, last = (group.unit or "(root)" for group in (run[0], run[-1]))
    return first if len(run) == 1 else f"{first} to {last} ({len(run)} alike)"


def readable(nbytes: int) -> str:
    """Return a number of bytes in the largest binary unit that leaves at least 1."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def _group_layout(group: Group, shapes: Mapping[str, Sequence[int]]) -> GroupLayout:
    prefix = f"{group.name}." if group.name else ""
    parts = getattr(group, "parts", ())
    tensors = []
    for index, (request, offset) in enumerate(
        zip(group.plan.requests, group.plan.offsets, strict=True)
    ):
        if parts:  # names in a unit of several modules start with the module's place in it
            part, _, name = request.fqn.partition(".")
            name = full = f"{parts[int(part)]}.{name}"
        else:
            name = request.fqn.removeprefix(prefix)
            full = f"{prefix}{name}"
        shape = shapes.get(full, (request.numel,))
        block = max(1, min(request.block, request.numel))
        runs = group.plan.shard_runs(index)
        tensors.append(TensorLayout(name, tuple(shape), request.numel, block, offset, runs))
    return GroupLayout(
        group.name,
        group.dtype,
        group.param_dtype or group.dtype,
        group.trainable,
        group.plan,
        tuple(tensors),
    )


def _facts(group: GroupLayout) -> str:
    kind = str(group.dtype).removeprefix("torch.")
    if group.param_dtype != group.dtype:
        kind += f" gathered as {str(group.param_dtype).removeprefix('torch.')}"
    plan = group.plan
    lanes = len(plan.lane_ranges)
    return (
        f"{kind}, {'trained' if group.trainable else 'frozen'}, {plan.world_size} ranks x "
        f"{plan.shard_numel:,} elements ({readable(group.nbytes_per_rank)}), "
        f"{f'{lanes} lanes, ' if lanes > 1 else ''}"
        f"padding {plan.padding_numel:,} elements ({plan.padding:.2%})"
    )


def _cells(tensor: TensorLayout) -> tuple[str, ...]:
    ranks = tensor.ranks
    span = "none" if not ranks else f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"
    shape = ", ".join(map(str, tensor.shape))
    return (
        tensor.name,
        f"[{shape}]",
        f"{tensor.numel:,}",
        f"{tensor.block:,}",
        f"{tensor.offset:,}",
        span,
    )


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        cell.ljust(width) if i < TEXT_COLUMNS else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()
