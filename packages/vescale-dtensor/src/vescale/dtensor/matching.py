# SPDX-License-Identifier: Apache-2.0
"""Check a state against the tensors that it is to fill, on all ranks alike, and fill them.

A state is any nesting of dicts and lists; its leaves go by their paths.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.spec import base_block, layout_of, ragged_axis
from vescale.dtensor.tensor import adopt

Path = tuple[str | int, ...]
MOST_NAMES = 10  # in one message


def match_full_state(
    target_state: dict[str, Any],
    full_state: dict[str, Any] | None,
    *,
    src: int | None = 0,
    strict: bool = True,
    optional: Collection[str] = (),
    allow_meta: bool = False,
    parts: bool = False,
) -> "MatchedState":
    """Check ``full_state`` against ``target_state`` as ``load_full_state_dict`` does; copy nothing.

    With ``strict=False`` keys may be missing, or be there in vain; those named in ``optional``
    may be missing in any case. With ``allow_meta=True`` targets may be on the meta device. With
    ``parts=True``, where every rank has a state (``src=None``), its tensors may be DTensors of
    any placement, the same on all ranks. Without a process group ``src`` is this process.
    """
    src = src if dist.is_initialized() else None
    targets, mine = dict(leaves(target_state)), src is None or dist.get_rank() == src
    given = dict(leaves(full_state or {})) if mine else {}
    header = [{path: _describe(x) for path, x in given.items()}]
    if src is not None:
        dist.broadcast_object_list(header, src=src)
    described = header[0]
    absent = [path for path in targets if path not in described]
    missing = [path for path in absent if name_of(path) not in optional]
    unexpected = [path for path in described if path not in targets]
    problem = None
    if strict and (missing or unexpected):
        problem = f"missing are {_names(missing)}, and nothing wants {_names(unexpected)}"
        if any(path[0] == "state" for path in unexpected):
            problem += (
                "; an optimizer that made no step yet has no state: take "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(), which makes it"
            )
    _agree(problem or _problem(targets, described, allow_meta, parts))
    described = {path: described[path] for path in targets if path in described}
    if parts:
        _agree_on({name_of(path): value for path, value in described.items()})
    return MatchedState(
        [*map(name_of, missing)],
        [*map(name_of, unexpected)],
        [*map(name_of, absent)],
        src,
        described,
        given,
    )


@dataclass(frozen=True)
class MatchedState:
    """A state that fits its targets.

    ``missing`` and ``unexpected`` are names of keys; ``absent`` are the missing ones and those
    that were optional.
    """

    missing: list[str]
    unexpected: list[str]
    absent: list[str]
    src: int | None
    described: dict[Path, Any]
    given: dict[Path, Any]

    def copy_into(self, target_state: dict[str, Any]) -> None:
        """Fill ``target_state``, which has the keys that were checked, in place."""
        targets = dict(leaves(target_state))
        device = _device(targets.values())
        for path, whole in self.described.items():
            if not isinstance(whole, Described):
                continue
            if self.src is None:
                fill(targets[path], self.given[path].detach())
            else:
                fill(targets[path], _broadcast(self.given.get(path), whole, device, self.src))
        values = {p: v for p, v in self.described.items() if not isinstance(v, Described)}
        _replace(target_state, values)


@dataclass(frozen=True)
class Described:
    """What the other ranks must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Any, ...] | None  # None: a plain tensor


def _describe(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    placements = tuple(x.placements) if isinstance(x, TorchDTensor) else None
    return Described(tuple(x.shape), x.dtype, placements)


def _problem(
    targets: dict[Path, Any], described: dict[Path, Any], allow_meta: bool, parts: bool
) -> str | None:
    """Say why a value of ``described`` cannot fill its target, or return None."""
    for path, target in targets.items():
        if path not in described:
            continue
        whole, name = described[path], name_of(path)
        if isinstance(whole, Described) != isinstance(target, torch.Tensor):
            return f"{name} is a tensor on one side only"
        if not isinstance(whole, Described):
            continue
        if whole.placements is not None and not parts:
            return f"{name} is a DTensor in the full state; pass what full_state_dict() returns"
        if any(placement.is_partial() for placement in whole.placements or ()):
            return f"{name} is {whole.placements} in the state; redistribute it first"
        if whole.shape != tuple(target.shape):
            return f"{name} has shape {whole.shape}, but its target has {tuple(target.shape)}"
        if not torch.can_cast(whole.dtype, target.dtype):
            return (
                f"{name} is {whole.dtype}, which does not become {target.dtype}; convert it first"
            )
        if isinstance(target, TorchDTensor) and any(p.is_partial() for p in target.placements):
            return f"{name} is to be loaded into {target.placements}; redistribute it first"
        if type(target) is TorchDTensor and ragged_axis(target.placements) is not None:
            return f"{name} is ragged but of torch's own class, so its parts are wrong"
        if target.is_meta and not allow_meta:
            return f"{name} is to be loaded into a tensor on the meta device; materialise it first"
    return None


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy this rank's part of ``source`` into ``target``, of the same shape, in place.

    ``target`` is a DTensor of any placement but Partial, or plain. A plain ``source`` is the whole
    tensor: no communication, and no copy of it. From a DTensor placed otherwise the part is
    redistributed, which is collective and, between different meshes, takes the whole tensor.
    """
    if isinstance(source, TorchDTensor):
        placed = _as_placed(target, source)
        if placed is None:
            return
        source = placed
    if not isinstance(target, TorchDTensor):
        target.detach().copy_(source)
        return
    spec, local = target._spec, target._local_tensor.detach()
    mesh, coordinate, layout = spec.mesh, spec.mesh.get_coordinate(), layout_of(spec)
    if coordinate is None:
        return
    if layout is not None:
        for box in layout.boxes:
            part = local[box.start : box.start + box.numel].view(box.shape)
            part.copy_(source[_slices(box.offset, box.shape)])
    elif all(type(placement) in (Replicate, Shard) for placement in spec.placements):
        shape, offset = base_block(tuple(source.shape), spec.placements, mesh.shape, coordinate)
        local.copy_(source[_slices(offset, shape)])
    else:  # torch's strided shards
        local.copy_(
            torch_distribute_tensor(source, mesh, spec.placements, src_data_rank=None).to_local()
        )


def _as_placed(target: torch.Tensor, source: TorchDTensor) -> torch.Tensor | None:
    """Fill ``target`` from ``source`` where one mesh has both, else return the whole of it."""
    if not isinstance(target, TorchDTensor) or target.device_mesh != source.device_mesh:
        return adopt(source).full_tensor()
    if source.placements != target.placements:
        source = adopt(source).redistribute(placements=target.placements)
    mine, theirs = target._local_tensor.detach(), source._local_tensor.detach()
    if mine.data_ptr() != theirs.data_ptr() or mine.dtype != theirs.dtype:
        mine.copy_(theirs)
    return None


def leaves(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of everything in ``state`` that is no dict or list, in order."""
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, (*path, key))
    else:
        yield path, state


def name_of(path: Path) -> str:
    """Return a path as a user reads it."""
    return ".".join(map(str, path))


def _names(paths: Iterable[Path]) -> str:
    names = sorted(map(name_of, paths))
    more = len(names) - MOST_NAMES
    return f"{names[:MOST_NAMES]}" + (f" and {more} more" if more > 0 else "")


def _slices(offset: Iterable[int], shape: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def _replace(state: Any, values: dict[Path, Any]) -> None:
    for path, value in values.items():
        place = state
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value


def _agree(problem: str | None) -> None:
    """Raise on all ranks what any of them has found."""
    found = {text: rank for rank, text in reversed([*enumerate(_everyones(problem))]) if text}
    if found:
        text, rank = min(found.items(), key=lambda item: item[1])
        raise ValueError(f"cannot load the full state: {text} (rank {rank}).")


def _agree_on(described: dict[str, Any]) -> None:
    """Raise on all ranks where they have other tensors: what follows may be collective."""
    mine = {k: v for k, v in described.items() if isinstance(v, Described) and v.placements}
    everyones = _everyones(mine)
    for rank, theirs in enumerate(everyones):
        for name in sorted(everyones[0].keys() | theirs.keys()):
            if everyones[0].get(name) != theirs.get(name):
                raise ValueError(
                    f"cannot load the full state: {name} is {everyones[0].get(name)} on rank 0 and "
                    f"{theirs.get(name)} on rank {rank}; pass the same DTensors on every rank."
                )


def _everyones(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _broadcast(
    whole: torch.Tensor | None, description: Described, device: torch.device, src: int
) -> torch.Tensor:
    if whole is None:
        whole = torch.empty(description.shape, dtype=description.dtype, device=device)
    else:
        whole = whole.detach().to(device).contiguous()
    if whole.numel():
        dist.broadcast(whole.view(-1).view(torch.uint8), src=src)
    return whole


def _device(targets: Iterable[Any]) -> torch.device:
    """Return where broadcasts happen: on the device of the first DTensor, or of any tensor."""
    tensors = [x for x in targets if isinstance(x, torch.Tensor)]
    tensors.sort(key=lambda x: not isinstance(x, TorchDTensor))
    return tensors[0].device if tensors else torch.device("cpu")
