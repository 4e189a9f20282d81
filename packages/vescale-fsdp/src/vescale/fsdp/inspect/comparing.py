# SPDX-License-Identifier: Apache-2.0
"""Compare two models or checkpoints where their shards are, for debugging numerics."""

import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from vescale.dtensor.matching import Path as Keys
from vescale.dtensor.matching import fill, name_of
from vescale.dtensor.tensor import adopt
from vescale.fsdp._torch_compat import device_for
from vescale.fsdp.agreement import agree
from vescale.fsdp.inference import ordinary_tensors
from vescale.fsdp.inspect.differences import Diff, Difference, Status, ordered
from vescale.fsdp.inspect.measuring import NOWHERE, Measured, measure, over_ranks
from vescale.fsdp.inspect.sides import Described, InFolder, InMemory, Side, side

Given = nn.Module | Mapping[str, Any] | str | PathLike


@ordinary_tensors
@torch.no_grad()
def diff(a: Given, b: Given, *, group: dist.ProcessGroup | None = None) -> Diff:
    """Compare the tensors of ``a`` and ``b`` by name, shard by shard, and return what differs.

    Each is a model, wrapped or not, with its parameters and persistent buffers; a state dict, whole
    or sharded, also nested; or the folder of a checkpoint that
    ``torch.distributed.checkpoint`` or ``CheckpointManager`` wrote. Beside a model, or a state
    without a key ``"model"``, a folder counts with what is under ``"model"``, if it has that. What
    is no tensor is not compared.

    Granularity, mesh and number of ranks may differ between ``a`` and ``b``. Parts are compared
    where they are: tensors placed alike are read in place; of the others, and of folders, each rank
    has one shard at a time made for it. One whole tensor at a time is held where the two meshes
    differ, where both are plain, and where both are folders, whose tensors the ranks share.

    Where a side has DTensors, or both are folders and there is a process group, all ranks of
    ``group`` (the default one) must call this, with the same tensors; then all get the same answer.
    Otherwise nothing is sent. Raises TypeError and ValueError for what cannot be compared, and
    RuntimeError on all ranks where one of them cannot, or has other tensors.
    """
    sides = side(a, "a"), side(b, "b")
    together = dist.is_initialized() and _needs_others(*sides)
    error = None
    try:
        for each in sides:
            each.open()
    except Exception as caught:
        if not together:
            raise
        error = caught
    if not together:
        return _compare(*sides, None)
    world: Any = group or dist.group.WORLD
    # Of a folder that cannot be read there is nothing to describe, and then that is the error.
    lines = [] if error else [line for each in sides for line in sorted(each.lines())]
    described = "\n".join(lines)
    agree(world, device_for(world), "compare their tensors", described, error)
    return _compare(*sides, world)


def _needs_others(a: Side, b: Side) -> bool:
    """Tell whether any side is sharded, or both are folders."""
    if isinstance(a, InFolder) and isinstance(b, InFolder):
        return True
    memory = [each for each in (a, b) if isinstance(each, InMemory)]
    return any(isinstance(x, DTensor) for each in memory for x in each.tensors.values())


def _compare(a: Side, b: Side, group: dist.ProcessGroup | None) -> Diff:
    _take_models(a, b)
    of_a, of_b = a.described(), b.described()
    both = [path for path, (shape, _) in of_a.items() if path in of_b and of_b[path][0] == shape]
    found, copies = {}, 1
    for index, path in enumerate(both):
        found[path], number = _measured(a, b, path, index, group)
        copies = max(copies, number)
    if group is not None:
        summed = over_ranks([*found.values()], copies, group, device_for(group))
        found = dict(zip(found, summed, strict=True))
    return Diff(
        ordered([_entry(path, of_a.get(path), of_b.get(path), found) for path in of_a | of_b])
    )


def _take_models(a: Side, b: Side) -> None:
    """Leave of a folder beside a model, or the state of one, what is of the model."""
    for one, other in ((a, b), (b, a)):
        if isinstance(one, InFolder) and isinstance(other, InMemory) and not other.has_model:
            one.take_model()


# --- one tensor -----------------------------------------------------------------------------


def _measured(
    a: Side, b: Side, path: Keys, index: int, group: dist.ProcessGroup | None
) -> tuple[Measured, int]:
    """Return what this rank finds of one tensor, and how many copies of it the ranks hold."""
    if isinstance(a, InFolder) and isinstance(b, InFolder):
        if group is not None and index % group.size() != group.rank():
            return Measured(), 1
        return measure(*(each.read(path).reshape(-1) for each in (a, b))), 1
    target = _placed(a, b, path)
    pair: list[Any] = [_as_placed(each, path, target) for each in (a, b)]
    x, y = pair
    if not isinstance(target, DTensor):
        part = measure(x.reshape(-1), y.reshape(-1))
        part.copy = None
        return part, 1
    axes = [axis for axis, placed in enumerate(target.placements) if placed.is_replicate()]
    copies = math.prod(target.device_mesh.size(axis) for axis in axes)
    coordinate = target.device_mesh.get_coordinate()
    if coordinate is None:
        return Measured(), copies
    part = measure(*(each.to_local().reshape(-1) for each in (x, y)))
    for axis in axes:
        part.copy = (part.copy or 0) * target.device_mesh.size(axis) + coordinate[axis]
    if part.count:
        part.first = _place_in_whole(part.first, target)
    return part, copies


def _placed(a: Side, b: Side, path: Keys) -> torch.Tensor:
    """Return the tensor of ``a`` or ``b`` as which both are placed: a DTensor, if there is one."""
    tensors = [each.tensors[path] for each in (a, b) if isinstance(each, InMemory)]
    target = next((x for x in tensors if isinstance(x, DTensor)), tensors[0])
    if isinstance(target, DTensor) and any(placed.is_partial() for placed in target.placements):
        target = adopt(target).redistribute(placements=[Replicate()] * target.device_mesh.ndim)
    return target


def _as_placed(given: Side, path: Keys, target: torch.Tensor) -> torch.Tensor:
    """Return the tensor of ``given`` placed as ``target``: itself, where it is."""
    if isinstance(given, InFolder):
        made = torch.empty_like(target, dtype=given.entries[path].dtype)
        given.read_into(path, made)
        return made
    x = given.tensors[path]
    if not isinstance(target, DTensor):
        return x.to(target.device)
    if isinstance(x, DTensor) and (x.device_mesh, x.placements) == (
        target.device_mesh,
        target.placements,
    ):
        return x
    made = torch.empty_like(target, dtype=x.dtype)
    fill(made, x)
    return made


def _place_in_whole(flat: int, x: DTensor) -> int:
    """Return the flat index in the whole of ``x`` of element ``flat`` of this rank's part."""
    for chunk in x.__create_chunk_list__():
        numel = math.prod(chunk.sizes)
        if flat < numel:
            inside = np.unravel_index(flat, tuple(chunk.sizes))
            index = [int(i) + offset for i, offset in zip(inside, chunk.offsets, strict=True)]
            return int(np.ravel_multi_index(index, tuple(x.shape))) if index else 0
        flat -= numel
    raise RuntimeError(f"element {flat} lies behind this rank's part of a tensor {x.placements}.")


def _entry(
    path: Keys, a: Described | None, b: Described | None, found: Mapping[Keys, Measured]
) -> Difference:
    name, texts = name_of(path), (_text(a), _text(b))
    shape = (a or b)[0]  # type: ignore[index]  # one has it
    if path not in found:
        status: Status = "only in a" if b is None else "only in b" if a is None else "shape"
        return Difference(name, status, *texts, numel=math.prod(shape))
    part = found[path]
    status = "dtype" if a != b else "differs" if part.count else "equal"
    first = None
    if part.first != NOWHERE:
        first = tuple(int(i) for i in np.unravel_index(part.first, shape))
    return Difference(
        name,
        status,
        *texts,
        numel=math.prod(shape),
        count=part.count,
        max_abs=part.max_abs,
        max_rel=part.max_rel,
        nans=(part.nans[0], part.nans[1]),
        first=first,
    )


def _text(described: Described | None) -> str:
    if described is None:
        return ""
    shape, dtype = described
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
