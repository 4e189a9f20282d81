# SPDX-License-Identifier: Apache-2.0
"""Which rank holds what of one parameter: from the plan of its group, without communication."""

import difflib
import itertools
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.dtensor.spec import layout_of
from vescale.fsdp.fqns import clean_fqn, groups_in
from vescale.fsdp.lanes import AnyPlan, LanePlan
from vescale.fsdp.managed import Managed
from vescale.fsdp.param_group import ParamGroup
from vescale.fsdp.units import param_groups

MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds: ``elements`` of the flat parameter, from ``shard_offset`` of its shard.

    ``rank`` is the global one, ``coordinate`` its place in the mesh. ``rows`` is set where the
    elements are whole rows, indices of dim 0, of a parameter of two dims or more.
    """

    rank: int
    coordinate: tuple[int, ...]
    elements: range
    rows: range | None
    shard_offset: int


@dataclass(frozen=True, slots=True)
class Location:
    """Where one parameter lies: in the buffer of its unit, and on which ranks.

    ``offset`` is where it starts in the gathered buffer of ``unit`` ("" is the root), in lane
    ``lane`` of ``lanes``. No rank boundary cuts a run of ``block`` elements. ``parts`` has those of
    the ``ranks`` ranks of the data mesh, with ``axes``, that hold at least one element; replicas
    hold the same. Elements and rows count within ``part_shape``: the whole parameter, or with
    tensor or expert parallelism this rank's part, which starts at index ``part_offset`` of it.
    """

    fqn: str
    unit: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    part_shape: tuple[int, ...]
    part_offset: tuple[int, ...]
    block: int
    offset: int
    lane: int
    lanes: int
    axes: tuple[str, ...]
    ranks: int
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        unit = self.unit or "(root)"
        lane = f", lane {self.lane} of {self.lanes}" if self.lanes > 1 else ""
        lines = [
            f"{self.fqn}: {list(self.shape)} {kind}, at {self.offset:,} in the buffer of unit "
            f"{unit!r}{lane}, blocks of {self.block:,} elements"
        ]
        if self.part_shape != self.shape:
            lines.append(
                f"of it, other axes leave this rank {list(self.part_shape)} from "
                f"{list(self.part_offset)}; elements and rows are of that:"
            )
        rows = [("rank", f"({', '.join(self.axes)})", "elements", "rows", "from, in its shard")]
        for part in self.parts:
            coordinate = ", ".join(map(str, part.coordinate))
            span = _span(part.rows) if part.rows is not None else "-"
            cells = (str(part.rank), f"({coordinate})", _span(part.elements), span)
            rows.append((*cells, f"{part.shard_offset:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  " + "  ".join(map(str.rjust, row, widths)) for row in rows]
        empty = self.ranks - len(self.parts)
        if empty:
            lines.append(f"{empty} of {self.ranks} ranks hold nothing of it.")
        return "\n".join(lines)


def where(model: nn.Module, fqn: str) -> Location:
    """Return which rank holds what of the parameter ``fqn`` of ``model``; no communication.

    The answer is the same on all ranks of the parameter's data mesh. Any name of a tied parameter
    will do, and names without what ``torch.compile`` or checkpointing put between. Takes a moment
    for any number of ranks; ``print`` it for a table.

    Raises ValueError for a model that is not wrapped, for a name that it does not have, which lists
    near ones, and for a parameter that ``fully_shard`` does not manage.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module.")
    param_groups(model)  # names units as they are called in this model
    groups = list(groups_in(model))
    if not groups:
        raise ValueError(
            f"{type(model).__name__} has no parameter under fully_shard, so every rank holds all "
            "of them; call vescale.fsdp.fully_shard on it, or on modules in it, first."
        )
    params = {
        clean_fqn(name): param for name, param in model.named_parameters(remove_duplicate=False)
    }
    found = params.get(clean_fqn(fqn))
    if found is None:
        raise ValueError(f"no parameter is called {fqn!r}; {_near(fqn, list(params))}.")
    for group in groups:
        for index, item in enumerate(group.managed):
            if item.sharded is found or item.gathered is found:
                return _location(clean_fqn(fqn), group, index, item)
    placed = f"is placed as {found.placements}" if isinstance(found, DTensor) else "is whole"
    raise ValueError(
        f"{fqn} is not under fully_shard: it {placed} on every rank. It may have been in "
        "ignored_params, or in no module that fully_shard was called on."
    )


def _location(fqn: str, group: ParamGroup, index: int, item: Managed) -> Location:
    plan, mesh = group.plan, group.data.mesh
    request = plan.requests[index]
    layout = layout_of(item.spec)
    part_offset = layout.base_offset if layout is not None else (0,) * len(item.block)
    ranks = mesh.mesh.flatten().tolist()
    parts = []
    for rank, coordinate in zip(ranks, itertools.product(*map(range, mesh.shape)), strict=True):
        axis = group.data.shard_axis
        begin, start, numel = plan.local_range(index, 0 if axis is None else coordinate[axis])
        if numel:
            elements = range(begin, begin + numel)
            parts.append(Part(rank, coordinate, elements, _rows(elements, item.block), start))
    lane, lanes = _lane(plan, index)
    return Location(
        fqn=fqn,
        unit=", ".join(map(clean_fqn, group.name.split(", "))),
        shape=tuple(item.spec.shape),
        dtype=group.dtype,
        part_shape=tuple(item.block),
        part_offset=tuple(part_offset),
        block=max(1, min(request.block, request.numel)),
        offset=plan.offsets[index],
        lane=lane,
        lanes=lanes,
        axes=tuple(mesh.mesh_dim_names or map(str, range(mesh.ndim))),
        ranks=len(ranks),
        parts=tuple(parts),
    )


def _lane(plan: AnyPlan, index: int) -> tuple[int, int]:
    return (plan.places[index][0], len(plan.lanes)) if isinstance(plan, LanePlan) else (0, 1)


def _rows(elements: range, shape: torch.Size) -> range | None:
    row = math.prod(shape[1:])
    if len(shape) < 2 or elements.start % row or elements.stop % row:
        return None
    return range(elements.start // row, elements.stop // row)


def _near(fqn: str, names: list[str]) -> str:
    """Say which of ``names`` may have been meant: alike, or with the same end."""
    alike = difflib.get_close_matches(fqn, names, MOST_NAMES, cutoff=0.5)
    ends = [name for name in names if fqn and name.endswith(f".{fqn}")]
    near = [*dict.fromkeys(alike + ends)][:MOST_NAMES]
    if near:
        return f"near it are {near}"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"there are {names[:MOST_NAMES]}{more}"


def _span(span: range) -> str:
    return f"{span.start}:{span.stop}"
