# SPDX-License-Identifier: Apache-2.0
"""Whole tensors out of a sharded state dict, and back in, one at a time.

torch's helpers for full state dicts call its own ``distribute_tensor``, which does not know
ragged placements and offers no hook for them. A state is any nesting of dicts and lists, as
``state_dict()`` of a module or of an optimizer gives it, or torch's ``get_model_state_dict`` and
``get_optimizer_state_dict``: fill what they return, and hand it to their ``set_`` twins.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.checkpoint import check_not_partial
from vescale.dtensor.placement import RaggedShard
from vescale.dtensor.spec import base_block, check_is_ours, layout_of, ragged_axis
from vescale.dtensor.tensor import adopt

__all__ = ["fill", "full_state_dict", "load_full_state_dict", "match_full_state"]

Path = tuple[str | int, ...]


def full_state_dict(
    state: dict[str, Any], *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, Any]:
    """Return ``state`` with whole, detached tensors in place of DTensors.

    Collective over every DTensor's mesh; all ranks pass the same keys in the same order. With
    ``rank0_only=True`` only global rank 0 returns the state, every other rank an empty dict, and
    a tensor on a mesh of one axis travels to that rank alone. With ``cpu_offload=True`` tensors
    move to the CPU one by one, so a device holds no more than one whole tensor at a time. Tensors
    that were whole already are not copied.

    Raises, before any collective, ValueError for a DTensor that is Partial, NotImplementedError
    for a ragged one of torch's own class, TypeError when ``state`` is no dict.
    """
    _check_is_dict("full_state_dict", state)
    for path, x in _leaves(state):
        if isinstance(x, TorchDTensor):
            check_not_partial(_name(path), x)
            check_is_ours(x)
    keep = not rank0_only or dist.get_rank() == 0

    def whole(x: Any) -> Any:
        if isinstance(x, TorchDTensor):
            x = _on_rank0(x) if rank0_only else adopt(x.detach()).full_tensor()
        if not keep or not isinstance(x, torch.Tensor):
            return x if keep else None
        return x.detach().cpu() if cpu_offload else x.detach()

    full = _map(whole, state)
    return full if keep else {}


def load_full_state_dict(
    target_state: dict[str, Any], full_state: dict[str, Any] | None, *, src: int | None = 0
) -> None:
    """Fill the tensors of ``target_state`` in place from whole ones that only rank ``src`` has.

    ``target_state`` holds DTensors of any placement, plain tensors and other values, the same
    keys on all ranks of the default group; ``full_state`` counts on global rank ``src`` only, and
    holds plain tensors, on any device. They are broadcast one at a time: a rank needs, beside its
    parts, the memory of the largest. With ``src=None`` every rank has a full state of its own,
    and nothing is broadcast. Values that are no tensors are replaced, in dicts and lists. Dtypes
    become those of the targets.

    Raises ValueError on all ranks, before any tensor is changed, when keys or shapes differ, a
    dtype cannot become the target's (float to integer), or a target is Partial, on meta, or a
    ragged tensor of torch's own class.
    """
    _check_is_dict("load_full_state_dict", target_state)
    match_full_state(target_state, full_state, src=src).copy_into(target_state)


def match_full_state(
    target_state: dict[str, Any],
    full_state: dict[str, Any] | None,
    *,
    src: int | None = 0,
    strict: bool = True,
    optional: Collection[str] = (),
    allow_meta: bool = False,
) -> "MatchedState":
    """Check ``full_state`` against ``target_state`` as ``load_full_state_dict`` does; copy nothing.

    With ``strict=False`` keys may be missing, or be there in vain; those named in ``optional``
    may be missing in any case. With ``allow_meta=True`` targets may be on the meta device.
    """
    targets, mine = dict(_leaves(target_state)), src is None or dist.get_rank() == src
    wholes = dict(_leaves(full_state or {})) if mine else {}
    header = [{path: _describe(x) for path, x in wholes.items()}]
    if src is not None:
        dist.broadcast_object_list(header, src=src)
    described = header[0]
    absent = [path for path in targets if path not in described]
    missing = [path for path in absent if _name(path) not in optional]
    unexpected = [path for path in described if path not in targets]
    problem = None
    if strict and (missing or unexpected):
        problem = f"missing are {_names(missing)}, and nothing wants {_names(unexpected)}"
        if any(path[0] == "state" for path in unexpected):
            problem += (
                "; an optimizer that made no step yet has no state: take "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(), which makes it"
            )
    _agree(problem or _problem(targets, described, allow_meta))
    described = {path: value for path, value in described.items() if path in targets}
    return MatchedState(
        [*map(_name, missing)],
        [*map(_name, unexpected)],
        [*map(_name, absent)],
        src,
        described,
        wholes,
    )


@dataclass(frozen=True)
class MatchedState:
    """A full state that fits its targets.

    ``missing`` and ``unexpected`` are names of keys; ``absent`` are the missing ones and those
    that were optional.
    """

    missing: list[str]
    unexpected: list[str]
    absent: list[str]
    src: int | None
    described: dict[Path, Any]
    wholes: dict[Path, Any]

    def copy_into(self, target_state: dict[str, Any]) -> None:
        """Fill ``target_state``, which has the keys that were checked, in place."""
        targets = dict(_leaves(target_state))
        device = _device(targets.values())
        for path, whole in self.described.items():
            if not isinstance(whole, _Whole):
                continue
            if self.src is None:
                fill(targets[path], self.wholes[path].detach())
            else:
                fill(targets[path], _broadcast(self.wholes.get(path), whole, device, self.src))
        values = {p: value for p, value in self.described.items() if not isinstance(value, _Whole)}
        _replace(target_state, values)


@dataclass(frozen=True)
class _Whole:
    """What the other ranks must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    distributed: bool


def _describe(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return _Whole(tuple(x.shape), x.dtype, isinstance(x, TorchDTensor))


def _problem(targets: dict[Path, Any], described: dict[Path, Any], allow_meta: bool) -> str | None:
    """Say why a value of ``described`` cannot fill its target, or return None."""
    for path, target in targets.items():
        if path not in described:
            continue
        whole, name = described[path], _name(path)
        if isinstance(whole, _Whole) != isinstance(target, torch.Tensor):
            return f"{name} is a tensor on one side only"
        if not isinstance(whole, _Whole):
            continue
        if whole.distributed:
            return f"{name} is a DTensor in the full state; pass what full_state_dict() returns"
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


def _check_is_dict(name: str, state: object) -> None:
    if not isinstance(state, dict):
        raise TypeError(
            f"{name} got a {type(state).__name__}; pass a dict, such as model.state_dict() or "
            "optimizer.state_dict()."
        )


def _agree(problem: str | None) -> None:
    """Raise on all ranks what any of them has found."""
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = {text: rank for rank, text in reversed([*enumerate(problems)]) if text}
    if found:
        text, rank = min(found.items(), key=lambda item: item[1])
        raise ValueError(f"cannot load the full state: {text} (rank {rank}).")


def _broadcast(
    whole: torch.Tensor | None, description: _Whole, device: torch.device, src: int
) -> torch.Tensor:
    if whole is None:
        whole = torch.empty(description.shape, dtype=description.dtype, device=device)
    else:
        whole = whole.detach().to(device).contiguous()
    if whole.numel():
        dist.broadcast(whole.view(-1).view(torch.uint8), src=src)
    return whole


def fill(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of ``whole`` [target.shape] into ``target``, without a copy of it.

    ``target`` is a DTensor of any placement but Partial, or plain; no communication.
    """
    if not isinstance(target, TorchDTensor):
        target.detach().copy_(whole)
        return
    spec, local = target._spec, target._local_tensor.detach()
    mesh, coordinate, layout = spec.mesh, spec.mesh.get_coordinate(), layout_of(spec)
    if coordinate is None:
        return
    if layout is not None:
        for box in layout.boxes:
            part = local[box.start : box.start + box.numel].view(box.shape)
            part.copy_(whole[_slices(box.offset, box.shape)])
    elif all(type(placement) in (Replicate, Shard) for placement in spec.placements):
        shape, offset = base_block(tuple(whole.shape), spec.placements, mesh.shape, coordinate)
        local.copy_(whole[_slices(offset, shape)])
    else:  # torch's strided shards
        local.copy_(
            torch_distribute_tensor(whole, mesh, spec.placements, src_data_rank=None).to_local()
        )


def _slices(offset: Iterable[int], shape: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def _on_rank0(x: TorchDTensor) -> torch.Tensor | None:
    """Return the whole tensor on global rank 0; anything elsewhere."""
    mesh, ranks = x.device_mesh, x.device_mesh.mesh.flatten().tolist()
    if 0 not in ranks:
        return None
    x = adopt(x.detach())
    if mesh.ndim == 1 and isinstance(x.placements[0], Shard | RaggedShard):
        place = ranks.index(0)
        owner = RaggedShard.from_runs((), ((0, place), (1, 1), (0, len(ranks) - place - 1)))
        return x.redistribute(placements=[owner]).local_block()
    return x.full_tensor()


def _device(targets: Iterable[Any]) -> torch.device:
    """Return where broadcasts happen: on the device of the first DTensor, or of any tensor."""
    tensors = [x for x in targets if isinstance(x, torch.Tensor)]
    tensors.sort(key=lambda x: not isinstance(x, TorchDTensor))
    return tensors[0].device if tensors else torch.device("cpu")


def _leaves(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _leaves(value, (*path, key))
    else:
        yield path, state


def _map(function: Callable[[Any], Any], state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _map(function, value) for key, value in state.items()}
    if isinstance(state, list):
        return [_map(function, value) for value in state]
    return function(state)


def _replace(state: Any, values: dict[Path, Any]) -> None:
    for path, value in values.items():
        place = state
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _names(paths: Iterable[Path]) -> str:
    names = sorted(map(_name, paths))
    return f"{names[:5]}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
