# SPDX-License-Identifier: Apache-2.0
"""Sharding plans: from patterns, as users write them, to the names of one module."""

import difflib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from vescale.legacy._errors import LegacyValueError
from vescale.legacy.dmodule.placements_interface import PlacementsInterface
from vescale.legacy.dtensor.placement_types import Placement

__all__ = ["check_plan", "resolve_forward", "resolve_parameters"]

PARTS = ("parameter", "forward")


def check_plan(plan: Mapping[str, Any] | None) -> tuple[Mapping, Mapping]:
    """Return the parameter and the forward part of a plan, empty where missing.

    ``KeyError`` for another key, with the right one that looks most like it.
    """
    plan = plan or {}
    for key in plan:
        if key not in PARTS:
            near = difflib.get_close_matches(str(key), PARTS, 1, cutoff=0)[0]
            raise KeyError(
                f"{key!r} is no part of a sharding plan; did you mean {near!r}? Expected some of "
                f"{list(PARTS)}."
            )
    return plan.get("parameter") or {}, plan.get("forward") or {}


def resolve_parameters(
    module: nn.Module, plan: Mapping[str, Any], mesh_ndim: int
) -> dict[str, PlacementsInterface]:
    """Return the entry of each parameter and buffer that a pattern matches, by its full name."""
    found: dict[str, PlacementsInterface] = {}
    keys = [(*_split(key), key) for key in plan]
    for path, submodule in module.named_modules():
        for name, tensor in {**submodule._parameters, **submodule._buffers}.items():
            matching = [key for pattern, last, key in keys if _same(last, name, pattern, path)]
            if tensor is None or not matching:
                continue
            fqn = f"{path}.{name}" if path else name
            entry = PlacementsInterface.from_placements(plan[_last(matching, fqn)]).copy()
            entry.normalize_placements(mesh_ndim, tensor_ndim=tensor.ndim, none_as_replicate=True)
            found[fqn] = entry
    return found


def resolve_forward(module: nn.Module, plan: Mapping[str, Any], mesh_ndim: int) -> dict[str, Any]:
    """Return the normalized entries by full name, such as ``fc1.output`` or ``fc1.weight``."""
    found: dict[str, Any] = {}
    keys = [(*_split(key), key) for key in plan]
    for path, submodule in module.named_modules():
        names = {last for pattern, last, _ in keys if re.fullmatch(pattern, path)}
        for name in sorted(names):
            fqn = f"{path}.{name}" if path else name
            if name not in ("input", "output") and submodule._parameters.get(name) is None:
                raise LegacyValueError(
                    f"forward plan: {fqn} is no parameter of {type(submodule).__name__}; expected "
                    f"input, output or one of {sorted(submodule._parameters)}."
                )
            matching = [key for pattern, last, key in keys if _same(last, name, pattern, path)]
            found[fqn] = _normalized(plan[_last(matching, fqn)], mesh_ndim, fqn)
    return found


def _split(key: str) -> tuple[str, str]:
    """Return (pattern of the module, last name); the last dot may be escaped."""
    pattern, _, name = key.rpartition(".")
    backslashes = len(pattern) - len(pattern.rstrip("\\"))
    return (pattern[:-1] if backslashes % 2 else pattern), name


def _same(last: str, name: str, pattern: str, path: str) -> bool:
    return last == name and re.fullmatch(pattern, path) is not None


def _last(matching: Sequence[str], fqn: str) -> str:
    if len(matching) > 1:
        warnings.warn(
            f"{len(matching)} keys of the plan match {fqn}: {list(matching)}; the last is taken.",
            stacklevel=4,
        )
    return matching[-1]


def is_placements(value: Any) -> bool:
    """Tell whether ``value`` is a sequence of placements, for one tensor."""
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(placement, Placement) for placement in value)
    )


def _normalized(value: Any, mesh_ndim: int, fqn: str) -> Any:
    if value is None:
        return None
    if isinstance(value, PlacementsInterface) or is_placements(value):
        entry = PlacementsInterface.from_placements(value).copy()
        entry.normalize_placements(mesh_ndim)
        return entry
    if isinstance(value, Mapping):
        return {key: _normalized(inner, mesh_ndim, fqn) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        if any(isinstance(inner, Mapping) for inner in value):
            raise NotImplementedError(
                f"forward plan of {fqn}: a dict inside a list; write the outer one as a dict of "
                "argument names too."
            )
        return [_normalized(inner, mesh_ndim, fqn) for inner in value]
    raise LegacyValueError(
        f"forward plan of {fqn}: {value!r} is no placements, PlacementsInterface, list, dict or "
        "None."
    )
