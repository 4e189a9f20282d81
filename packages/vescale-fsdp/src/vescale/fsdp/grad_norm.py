# SPDX-License-Identifier: Apache-2.0
"""Clip gradients by their total norm, over any mix of meshes, placements and plain tensors."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from vescale.dtensor import RaggedShard, redistribute_many
from vescale.fsdp._torch_compat import foreach_mul_, foreach_norm
from vescale.fsdp.arguments import check_bool
from vescale.fsdp.fqns import sharded_parameters
from vescale.fsdp.mesh_sums import Home, plan_sums, reduce_slots


def clip_grad_norm_(
    module_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: SupportsFloat,
    norm_type: SupportsFloat = 2.0,
    error_if_nonfinite: bool = False,
    *,
    submesh_copies: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``; return the norm.

    As ``torch.nn.utils.clip_grad_norm_``, for parameters on any mix of meshes, ragged or plain
    DTensors and plain tensors. Every element counts once, and all ranks get the same total: a
    0-dim plain tensor, float32, or float64 where a gradient is. It is formed with at most one
    all-reduce per mesh axis (one in all, where one mesh of one axis spans the others); a Partial
    gradient is reduced for it as well, and stays Partial.

    - A plain tensor (``ignored_params``) is taken to be the same on all ranks.
    - ``submesh_copies``: whether a parameter on fewer ranks than another one is the same on every
      such group of ranks, and counts once (True), or another one on each, and each counts
      (False). None: the same where its mesh is a slice of the other one's, as ``mesh["dp"]``
      beside tensor parallelism on ``("dp", "tp")``; else another one, as experts that share a
      model with parameters sharded over all ranks.
    - ``norm_type``: any number; 0 counts gradients that are not all zeros, as torch does.
    - ``max_norm=math.inf`` only measures.

    Collective: all ranks of the meshes must call it. Raises TypeError and ValueError for
    arguments, before any collective; with ``error_if_nonfinite`` RuntimeError on all ranks alike,
    before anything is scaled, if the total is not finite.
    """
    limit, order = _number("max_norm", max_norm), _number("norm_type", norm_type)
    check_bool("error_if_nonfinite", error_if_nonfinite)
    if submesh_copies is not None:
        check_bool("submesh_copies", submesh_copies)
    if limit < 0:
        raise ValueError(f"max_norm={limit} is negative, and would turn gradients around.")
    named = _parameters(module_or_params)
    _check(named)
    with torch.no_grad():
        gradients = [param.grad for param in named.values()]
        locals_ = [None if grad is None else _local(grad) for grad in gradients]
        total = _total_norm(list(named.values()), gradients, locals_, order, submesh_copies)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(_nonfinite(total.item(), order, named, locals_))
        if not math.isinf(limit):
            _scale([part for part in locals_ if part is not None], limit, total)
    return total


def _total_norm(
    params: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    locals_: list[torch.Tensor | None],
    order: float,
    copies: bool | None,
) -> torch.Tensor:
    meshes = [getattr(param, "device_mesh", None) for param in params]
    placed = [
        getattr(param if grad is None else grad, "placements", ())
        for param, grad in zip(params, gradients, strict=True)
    ]
    parts = _without_partial(gradients, locals_, placed)
    used = [part for part in parts if part is not None]
    dtype = torch.float32
    if any(part.dtype in (torch.float64, torch.complex128) for part in used):
        dtype = torch.float64
    if not used and all(mesh is None for mesh in meshes):
        return torch.zeros((), device=params[0].device if params else None)
    result_device = used[0].device if used else _part(params[0]).device
    if result_device.type == "meta":
        raise ValueError("the parameters are on the meta device; materialise them first.")
    split: dict[DeviceMesh | None, set[int]] = {}
    for mesh, placements in zip(meshes, placed, strict=True):
        axes = split.setdefault(mesh, set())
        axes.update(axis for axis, p in enumerate(placements) if not p.is_replicate())
    homes = plan_sums(split, copies)
    if order == 0 and any(_differs(home, homes) for home in homes.values()):
        raise ValueError(
            "norm_type=0 counts gradients, and other ranks have gradients that this one does not "
            "know; call it for the parameters of each mesh by themselves."
        )
    device = _device(homes.values(), result_device)
    norms = _local_norms(parts, order, device)
    counted = [
        _counts(homes[mesh], placements) for mesh, placements in zip(meshes, placed, strict=True)
    ]
    if math.isinf(order):
        total = _extreme(norms, meshes, homes, order)
    else:
        total = _power_sum(norms, meshes, homes, counted, order)
    if order < 0 and not used:
        total = torch.zeros_like(total)
    return total.to(result_device, dtype)


def _power_sum(
    norms: torch.Tensor,
    meshes: list[DeviceMesh | None],
    homes: dict[DeviceMesh | None, Home],
    counted: list[bool],
    order: float,
) -> torch.Tensor:
    powers = norms if order in (0, 1) else norms.pow(order)
    if not all(counted):
        # What another rank counts is left out here, except that it is not finite.
        mask = torch.tensor(counted, device=powers.device)
        powers = torch.where(mask | ~powers.isfinite(), powers, 0)
    parts = [_members(powers, meshes, mesh) for mesh in homes]
    if order != 0:
        weights = [home.weight for home in homes.values()]
        parts = [part.sum(0, keepdim=True) * w for part, w in zip(parts, weights, strict=True)]
    slots, groups = _by_groups(parts, homes, torch.cat if order == 0 else sum)
    sums = torch.cat(reduce_slots(slots, groups, dist.ReduceOp.SUM, "gradient norms"))
    if order == 0:
        return (sums != 0).sum()
    return sums.sum() if order == 1 else sums.sum().pow(1 / order)


def _extreme(
    norms: torch.Tensor,
    meshes: list[DeviceMesh | None],
    homes: dict[DeviceMesh | None, Home],
    order: float,
) -> torch.Tensor:
    """Return the largest (or for -inf the smallest) of the norms, or NaN where there is one.

    Copies do not change it. NaN travels as a flag: backends disagree on its maximum.
    """
    sign = 1.0 if order > 0 else -1.0
    parts = []
    for mesh in homes:
        mine = _members(norms, meshes, mesh) * sign
        is_nan = mine.isnan()
        parts.append(torch.stack([mine.masked_fill(is_nan, -math.inf).amax(), is_nan.any()]))
    slots, groups = _by_groups(parts, homes, lambda same: torch.stack(same).amax(0))
    found = torch.stack(reduce_slots(slots, groups, dist.ReduceOp.MAX, "gradient norms"))
    value = found[:, 0].amax() * sign
    return torch.where(found[:, 1].amax() > 0, math.nan, value)


def _by_groups(
    parts: list[torch.Tensor], homes: dict[DeviceMesh | None, Home], join: Callable
) -> tuple[list[torch.Tensor], list[list[dist.ProcessGroup]]]:
    """Join the parts that are reduced alike: a rank sends no more for knowing more meshes."""
    alike: dict[tuple[str, ...], tuple[list[torch.Tensor], list[dist.ProcessGroup]]] = {}
    for part, home in zip(parts, homes.values(), strict=True):
        names = tuple(group.group_name for group in home.groups)
        alike.setdefault(names, ([], home.groups))[0].append(part)
    return [join(same) for same, _ in alike.values()], [groups for _, groups in alike.values()]


def _members(
    values: torch.Tensor, meshes: list[DeviceMesh | None], mesh: DeviceMesh | None
) -> torch.Tensor:
    mine = [index for index, other in enumerate(meshes) if other == mesh]
    if len(mine) == len(meshes):
        return values
    return values[torch.tensor(mine, device=values.device)]


def _local_norms(parts: Sequence[Any], order: float, device: torch.device) -> torch.Tensor:
    """Return the norm of every part, float64 where there is; the neutral one for nothing."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    neutral = math.inf if order < 0 else 0.0
    norms = [torch.full((), neutral, dtype=wide, device=device)] * len(parts)
    alike: dict[tuple, list[int]] = {}
    for index, part in enumerate(parts):
        if part is not None and part.numel():
            alike.setdefault((part.device, part.dtype), []).append(index)
    for (_, dtype), indices in alike.items():
        half = dtype in (torch.float16, torch.bfloat16)
        found = foreach_norm(
            [parts[index] for index in indices], order, torch.float32 if half else None
        )
        stacked = torch.stack(found).to(device, wide)
        for index, norm in zip(indices, stacked.unbind(), strict=True):
            norms[index] = norm
    return torch.stack(norms)


def _scale(parts: Sequence[torch.Tensor], limit: float, total: torch.Tensor) -> None:
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    alike: dict[tuple, list[torch.Tensor]] = {}
    for part in parts:
        if part.numel():
            alike.setdefault((part.device, part.dtype), []).append(part)
    for (device, _), mine in alike.items():
        foreach_mul_(mine, factor.to(device))


def _without_partial(
    gradients: list[torch.Tensor | None],
    locals_: list[torch.Tensor | None],
    placed: list[tuple[Placement, ...]],
) -> list[torch.Tensor | None]:
    """Return parts of which norms can be taken: pending sums are done, into ragged parts.

    Changes ``placed`` to what these parts are.
    """
    parts = list(locals_)
    pending = [
        index
        for index, placements in enumerate(placed)
        if gradients[index] is not None and any(p.is_partial() for p in placements)
    ]
    if not pending:
        return parts
    partial: list[Any] = [gradients[index] for index in pending]
    targets = [_reduced(grad) for grad in partial]
    done = redistribute_many(partial, targets)
    for index, target, grad in zip(pending, targets, done, strict=True):
        parts[index], placed[index] = grad.to_local(), tuple(target)
    return parts


def _reduced(grad: DTensor) -> list[Placement]:
    target = [Replicate() if p.is_partial() else p for p in grad.placements]
    if all(type(p) is Replicate for p in target) and grad.numel():
        axis = next(i for i, p in enumerate(grad.placements) if p.is_partial())
        share, rest = divmod(grad.numel(), grad.device_mesh.size(axis))
        units = [share + (rank < rest) for rank in range(grad.device_mesh.size(axis))]
        target[axis] = RaggedShard(tuple(range(grad.ndim)), units)
    return target


def _counts(home: Home, placements: Sequence[Placement]) -> bool:
    """Tell whether this rank's part is the one that counts among copies."""
    if home.mesh is None:
        return home.counts
    coordinate = home.mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(coordinate[axis] == 0 for axis in home.axes if placements[axis].is_replicate())


def _differs(home: Home, homes: dict[DeviceMesh | None, Home]) -> bool:
    """Tell whether ranks beyond the mesh of ``home`` may hold other tensors in its place."""
    sizes = {id(other): other.mesh.size() for other in homes.values() if other.mesh is not None}
    largest = max((sizes[id(other)] for other in homes.values() if other.inside), default=0)
    return home.inside and home.weight == 1 and sizes[id(home)] < largest


def _device(homes: Iterable[Home], local: torch.device) -> torch.device:
    """Return where numbers are added: where the meshes communicate."""
    for home in homes:
        if home.groups and home.mesh is not None and home.mesh.device_type != local.type:
            kind = home.mesh.device_type
            if kind == "cpu":
                return torch.device("cpu")
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return local


def _part(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _local(grad: torch.Tensor) -> torch.Tensor:
    return _part(grad).detach()


def _number(name: str, value: SupportsFloat) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a number.") from error
    if math.isnan(number):
        raise ValueError(f"{name} is not a number (nan).")
    return number


def _parameters(given: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> dict:
    """Return name and parameter, each once; the name is the place in the list where need be."""
    if isinstance(given, nn.Module):
        return sharded_parameters(given)
    if isinstance(given, torch.Tensor):
        return {"the tensor": given}
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(
            f"module_or_params is a {type(given).__name__}, expected a module or parameters; pass "
            "for example model, or model.parameters()."
        )
    seen: set[int] = set()
    named = {}
    for index, param in enumerate(given):
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"module_or_params[{index}] is a {type(param).__name__}, expected a tensor; pass "
                "model.parameters(), or the tensors of an optimizer's group['params']."
            )
        if id(param) not in seen:
            seen.add(id(param))
            named[f"parameter {index}"] = param
    return named


def _check(named: dict[str, torch.Tensor]) -> None:
    for name, param in named.items():
        grad = param.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            raise ValueError(
                f"{name}: its gradient is {grad.layout}; clip works on dense gradients, make the "
                "layer with sparse=False."
            )
        if getattr(grad, "device_mesh", None) != getattr(param, "device_mesh", None):
            raise ValueError(
                f"{name} and its gradient are on different meshes: "
                f"{getattr(param, 'device_mesh', 'a plain tensor')} and "
                f"{getattr(grad, 'device_mesh', 'a plain tensor')}; set a gradient that is "
                "distributed over the mesh of its parameter."
            )
        for placement in getattr(grad, "placements", ()):
            if placement.is_partial() and (
                type(placement) is not Partial or placement.reduce_op not in _LINEAR
            ):
                raise ValueError(
                    f"{name}: its gradient is {placement}, which cannot be scaled before it is "
                    "reduced; redistribute it to Replicate or Shard first."
                )


_LINEAR = ("sum", "avg", "max", "min")


def _nonfinite(
    total: float,
    order: float,
    named: dict[str, torch.Tensor],
    locals_: list[torch.Tensor | None],
) -> str:
    bad = [
        name
        for name, part in zip(named, locals_, strict=True)
        if part is not None and not part.isfinite().all()
    ]
    here = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return (
        f"the total norm of order {order} of the gradients is {total}; on this rank "
        f"{here or 'no gradient'} is not finite. Nothing was clipped: lower the learning rate or "
        "the loss scale, skip this step, or pass error_if_nonfinite=False."
    )
