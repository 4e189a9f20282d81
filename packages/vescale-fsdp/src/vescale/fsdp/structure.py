# SPDX-License-Identifier: Apache-2.0
"""Find and replace the tensors in a module's inputs and outputs.

Walks tuples (named ones too), lists, dicts and dataclasses; anything else is left as it is.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to its tensors, or itself if none changes."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        mapped = {key: map_tensors(function, item) for key, item in value.items()}
        if all(mapped[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return mapped
        changed = value.copy()  # keeps the kind of dict and what else it carries
        changed.update(mapped)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = map_tensors(function, old)
            if new is not old:
                if not field.init:
                    raise TypeError(
                        f"{type(value).__name__}.{field.name} holds tensors to cast but is not an "
                        "argument of __init__; switch the cast off in MixedPrecisionPolicy."
                    )
                changes[field.name] = new
        return dataclasses.replace(value, **changes) if changes else value
    return value


def cast_floating(dtype: torch.dtype, value: Any) -> Any:
    """Return ``value`` with its floating-point tensors cast to ``dtype``."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)
