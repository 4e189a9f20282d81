# SPDX-License-Identifier: Apache-2.0
"""What a plan does to a model, as a table; without a mesh or a process group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Shard

from vescale.dtensor.plan.rules import Matches, Placed, Plan, clean, match, placements_on

COLUMNS = ("name", "rule", "placements", "collective")


@dataclass(frozen=True)
class Row:
    """A parameter, or the input or output of a module.

    ``placements`` has one for each axis, None where an activation stays as it comes.
    """

    name: str
    rule: str
    placements: tuple[Placement | None, ...]
    collective: str


@dataclass(frozen=True)
class Explanation:
    """The rows of a plan for one model; ``str()`` is a table."""

    axes: tuple[str, ...]
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        lines = [COLUMNS] + [
            (
                row.name,
                row.rule,
                ", ".join("-" if p is None else str(p) for p in row.placements),
                row.collective,
            )
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def explain(
    plan: Plan, module: nn.Module, mesh: DeviceMesh | Sequence[str] | None = None
) -> Explanation:
    """Return the rows of ``plan`` for ``module``; see ``Plan.explain``."""
    axes = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else mesh
    found = match(plan, module, None if axes is None else tuple(axes))
    rows = []
    for name, _ in module.named_parameters(remove_duplicate=False):
        ruled = found.params.get(clean(name), {})
        row = _row(clean(name), ruled, found, "")
        rows.append(replace(row, placements=placements_on(ruled, len(found.axes))))
    for name, owner in module.named_modules(remove_duplicate=False):
        fqn = clean(name)
        for argument, ruled in found.inputs.get(fqn, {}).items():
            moves = {_arrival(placed.placement) for placed in ruled.values()}
            rows.append(_row(f"{fqn or '(model)'} <- {argument}", ruled, found, _joined(moves)))
        if results := found.outputs.get(fqn):
            moves = {_departure(owner, fqn, axis, p, found) for axis, p in results.items()}
            rows.append(_row(f"{fqn or '(model)'} ->", results, found, _joined(moves)))
    return Explanation(found.axes, tuple(rows))


def _row(name: str, ruled: dict[int, Placed], found: Matches, collective: str) -> Row:
    placements = tuple(
        ruled[axis].placement if axis in ruled else None for axis in range(len(found.axes))
    )
    rules = dict.fromkeys(str(placed.rule) for placed in ruled.values())
    return Row(name, "; ".join(rules) or "-", placements, collective)


def _joined(moves: set[str]) -> str:
    return "; ".join(sorted(move for move in moves if move))


def _arrival(placement: Placement) -> str:
    if placement.is_replicate():
        return "all-gather of a Shard, all-reduce of a Partial"
    return (
        "reduce-scatter of a Partial, all-to-all of another Shard" if placement.is_shard() else ""
    )


def _departure(owner: nn.Module, fqn: str, axis: int, placed: Placed, found: Matches) -> str:
    """Return what it takes to place an output, which for linear and embedding layers is known."""
    weight = found.params.get(f"{fqn}.weight" if fqn else "weight", {}).get(axis)
    if weight is None or not isinstance(owner, nn.Linear | nn.Embedding):
        return _arrival(placed.placement)
    summed = Shard(1) if isinstance(owner, nn.Linear) else Shard(0)
    return collective(Partial() if weight.placement == summed else Shard(-1), placed.placement)


def collective(source: Placement, target: Placement) -> str:
    """Return the name of the collective that moves ``source`` to ``target``, or nothing."""
    if source.is_partial():
        return "all-reduce" if target.is_replicate() else "reduce-scatter"
    if source == target or source.is_replicate():
        return ""
    return "all-gather" if target.is_replicate() else "all-to-all"
