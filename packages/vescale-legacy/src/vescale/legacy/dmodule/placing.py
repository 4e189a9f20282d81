# SPDX-License-Identifier: Apache-2.0
"""Bring the values of a forward pass to where a plan says."""

import dataclasses
import inspect
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.legacy._errors import LegacyValueError
from vescale.legacy.dmodule.placements_interface import PlacementsInterface
from vescale.legacy.dtensor._diff import DeferReshardMode
from vescale.legacy.dtensor.conversion import from_local
from vescale.legacy.dtensor.redistribution import redistribute_dtensor

__all__ = ["deferring", "place_input", "place_output", "place_tensor"]

# The mode of the DModule that runs forward, for values that a plan defers.
deferring: ContextVar[DeferReshardMode | None] = ContextVar("deferring", default=None)


def place_tensor(x: torch.Tensor, entry: PlacementsInterface, mesh: DeviceMesh) -> torch.Tensor:
    """Return ``x`` under the placements of ``entry``; a plain tensor is taken for a part."""
    if entry.placements is None:
        return _with_gradient(x, entry)
    if not isinstance(x, DTensor):
        x = from_local(
            x,
            mesh,
            entry.placements,
            run_check=entry.run_check,
            support_uneven=entry.support_uneven,
            async_input=entry.async_op,
        )
    elif entry.defer_reshard and _waits(x, entry):
        x = deferring.get().defer(x, entry.placements, entry.async_op)
    else:
        x = redistribute_dtensor(x, x.device_mesh, entry.placements, entry.async_op)
    return _with_gradient(x, entry)


def place_input(
    plan: Any,
    signature: inspect.Signature,
    args: tuple,
    kwargs: dict[str, Any],
    mesh: DeviceMesh,
    where: str,
) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a call, placed by a list or dict plan."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    if isinstance(plan, Mapping):
        _place_by_name(plan, signature, bound, mesh, where)
    else:
        entries = [plan] if isinstance(plan, PlacementsInterface) else list(plan)
        _place_in_order(entries, signature, bound, mesh, where)
    return bound.args, bound.kwargs


def place_output(plan: Any, out: Any, mesh: DeviceMesh, where: str) -> Any:
    """Return the result of a call, placed by a list or dict plan, as the same type."""
    if isinstance(plan, PlacementsInterface):
        plan = [plan]
    fields = isinstance(out, Mapping) or dataclasses.is_dataclass(out)
    if isinstance(plan, Mapping) and not fields:
        warnings.warn(
            f"{where}: a dict plan has no effect on a {type(out).__name__}; write a list.",
            stacklevel=2,
        )
        return out
    if isinstance(plan, list) and not isinstance(out, list | tuple | Mapping) and not fields:
        return _place(plan[0] if plan else None, out, mesh, where, strict=True)
    return _place(plan, out, mesh, where, strict=True)


def _place_in_order(
    entries: list, signature: inspect.Signature, bound: Any, mesh: DeviceMesh, where: str
) -> None:
    left = iter(entries)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            given = bound.arguments[name]
            bound.arguments[name] = tuple(
                _place(next(left, None), value, mesh, where) for value in given
            )
        else:
            value = bound.arguments[name]
            bound.arguments[name] = _place(next(left, None), value, mesh, where)
    if rest := list(left):
        warnings.warn(
            f"{where}: the plan has {len(rest)} entries more than there are arguments; ignored.",
            stacklevel=2,
        )


def _place_by_name(
    plan: Mapping, signature: inspect.Signature, bound: Any, mesh: DeviceMesh, where: str
) -> None:
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    catch_all = next(
        (n for n, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), None
    )
    for key, entry in plan.items():
        if key in kinds and key != catch_all:
            value = bound.arguments[key]
            if kinds[key] is inspect.Parameter.VAR_POSITIONAL and isinstance(entry, list):
                entry = entry[: len(value)] + [None] * (len(value) - len(entry))
            bound.arguments[key] = _place(entry, value, mesh, f"{where} {key}")
        elif catch_all is not None:
            extra = bound.arguments[catch_all]
            if key in extra:
                extra[key] = _place(entry, extra[key], mesh, f"{where} {key}")
        else:
            warnings.warn(
                f"{where}: the plan names {key!r}, but the arguments are {list(kinds)}; ignored.",
                stacklevel=2,
            )


def _place(plan: Any, value: Any, mesh: DeviceMesh, where: str, strict: bool = False) -> Any:
    """Return ``value`` placed; with ``strict`` a value that is no tensor and has a plan raises."""
    if plan is None or value is None:
        return value
    if isinstance(plan, PlacementsInterface):
        if isinstance(value, torch.Tensor):
            return place_tensor(value, plan, mesh)
        if strict:
            raise RuntimeError(
                f"{where}: the plan places a {type(value).__name__}, which is no tensor; write "
                "None for it."
            )
        return value
    if isinstance(plan, Mapping):
        return _place_fields(plan, value, mesh, where, strict)
    if not isinstance(value, list | tuple):
        raise LegacyValueError(
            f"{where}: the plan is a list, the value a {type(value).__name__}; a dict, dataclass "
            "or ModelOutput wants a dict plan, one tensor placements."
        )
    if len(plan) != len(value):
        raise LegacyValueError(
            f"{where}: {len(plan)} entries in the plan for {len(value)} values; give one for each, "
            "None for those to leave alone."
        )
    placed = [_place(p, v, mesh, where, strict) for p, v in zip(plan, value, strict=True)]
    return type(value)(*placed) if hasattr(value, "_fields") else type(value)(placed)


def _place_fields(plan: Mapping, value: Any, mesh: DeviceMesh, where: str, strict: bool) -> Any:
    if isinstance(value, Mapping):  # a ModelOutput is a dict too, which knows its fields
        placed = {
            key: _place(plan.get(key), inner, mesh, f"{where} {key}", strict)
            for key, inner in value.items()
        }
        return placed if type(value) is dict else type(value)(**placed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        placed = {
            field.name: _place(
                plan.get(field.name),
                getattr(value, field.name),
                mesh,
                f"{where} {field.name}",
                strict,
            )
            for field in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **placed)
    raise LegacyValueError(f"{where}: a dict plan for a {type(value).__name__}; write a list.")


def _with_gradient(x: torch.Tensor, entry: PlacementsInterface) -> torch.Tensor:
    if entry.grad is not None and x.requires_grad:
        x.register_hook(lambda grad: redistribute_dtensor(grad, placements=entry.grad))
    return x


def _waits(x: DTensor, entry: PlacementsInterface) -> bool:
    return deferring.get() is not None and any(
        old.is_partial() and not new.is_partial()
        for old, new in zip(x.placements, entry.placements, strict=True)
    )
