# SPDX-License-Identifier: Apache-2.0
"""Tensor constructors that return DTensors, inside the forward of a DModule."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from vescale.legacy._errors import LegacyValueError
from vescale.legacy.dmodule.placements_interface import PlacementsInterface
from vescale.legacy.dtensor import factory

__all__ = ["FACTORIES", "FactoryDispatchModeOff", "FactoryDispatchModeOn"]

FACTORIES: dict[Callable, Callable] = {
    torch.zeros: factory.zeros,
    torch.ones: factory.ones,
    torch.empty: factory.empty,
    torch.full: factory.full,
    torch.rand: factory.rand,
    torch.randn: factory.randn,
    torch.arange: factory.arange,
}
REFUSED = ("out", "names", "generator")
IGNORED = ("device", "pin_memory", "memory_format")

_open = threading.local()


class _Factory(TorchFunctionMode):
    """One of a stack, of which the innermost decides."""

    def __enter__(self) -> "_Factory":
        if not hasattr(_open, "stack"):
            _open.stack = []
        _open.stack.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _open.stack.pop()
        return super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if _open.stack[-1] is self and func in FACTORIES:
            return self.make(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def make(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class FactoryDispatchModeOn(_Factory):
    """While innermost, ``torch.zeros`` and its like return DTensors on ``mesh``.

    ``table`` (see ``_provide_args``) says which, and under what placements. A ``device`` is
    ignored: the mesh has it. ``ValueError`` for ``out``, ``names`` and ``generator``.
    """

    def __init__(self, mesh: DeviceMesh, table: Mapping[Callable, PlacementsInterface]) -> None:
        super().__init__()
        self._mesh, self._table = mesh, table

    def make(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func not in self._table:
            return func(*args, **kwargs)
        for name in REFUSED:
            if kwargs.get(name) is not None:
                raise LegacyValueError(
                    f"torch.{func.__name__}({name}=...) inside a DModule with factory mode; leave "
                    f"it out, or turn the mode off for this module."
                )
        options = {k: v for k, v in kwargs.items() if k not in (*REFUSED, *IGNORED)}
        if options.get("layout", torch.strided) is None:
            del options["layout"]
        # Its own constructors, and those inside of torch's, are plain.
        with FactoryDispatchModeOff():
            return FACTORIES[func](
                *_by_position(args, options),
                **options,
                device_mesh=self._mesh,
                placements=self._table[func].placements,
            )


class FactoryDispatchModeOff(_Factory):
    """While innermost, constructors return what torch returns."""


def _provide_args(
    mesh: DeviceMesh, placements: Mapping[Callable, Any]
) -> dict[Callable, PlacementsInterface]:
    """Return the table of ``FactoryDispatchModeOn`` for ``{constructor: placements}``.

    Placements or a ``PlacementsInterface``; ``ValueError`` for another constructor.
    """
    table = {}
    for func, value in placements.items():
        if func not in FACTORIES:
            raise LegacyValueError(
                f"factory mode has no {getattr(func, '__name__', func)!r}; it has "
                f"{[known.__name__ for known in FACTORIES]} of torch."
            )
        entry = PlacementsInterface.from_placements(value).copy()
        entry.normalize_placements(mesh.ndim, none_as_replicate=True)
        table[func] = entry
    return table


def replicated(mesh: DeviceMesh) -> dict[Callable, PlacementsInterface]:
    """Return the table that makes everything ``Replicate``."""
    return _provide_args(mesh, dict.fromkeys(FACTORIES))


def _by_position(args: tuple, options: dict[str, Any]) -> tuple:
    """Return the arguments with those that torch takes by name too taken out of ``options``."""
    names = ("size", "fill_value", "start", "end", "step")
    return (*args, *[options.pop(name) for name in names if name in options])
