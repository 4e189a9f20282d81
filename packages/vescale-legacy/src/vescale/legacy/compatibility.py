# SPDX-License-Identifier: Apache-2.0
"""What the old package did to PyTorch when it was imported, now only where the program asks.

Each function changes PyTorch for the whole process, and does nothing the second time.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from vescale.legacy.dtensor import conversion
from vescale.legacy.dtensor.waiting import wait

__all__ = [
    "deprecated_function",
    "disable_jit_script",
    "install",
    "switch_dtensor_for_torch_export",
]

MARK = "_vescale_legacy"


def install() -> None:
    """Let methods of PyTorch's ``DTensor`` take the old keywords; their defaults stay PyTorch's.

    ``x.redistribute(mesh, placements, async_op)`` with its third argument positional,
    ``x.to_local(async_output=False)``, which waits, and ``DTensor.from_local(..., support_uneven=,
    async_input=)``, which is the old ``from_local`` where one of these is given.
    """
    if hasattr(DTensor.redistribute, MARK):
        return
    redistribute, to_local, from_local = (
        DTensor.redistribute,
        DTensor.to_local,
        DTensor.from_local,
    )

    @functools.wraps(redistribute)
    def new_redistribute(
        self: DTensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        async_op: bool = False,
        **options: Any,
    ) -> DTensor:
        return redistribute(self, device_mesh, placements, async_op=async_op, **options)

    @functools.wraps(to_local)
    def new_to_local(self: DTensor, *, async_output: bool = True, **options: Any) -> torch.Tensor:
        local = to_local(self, **options)
        return local if async_output else wait(local)

    @functools.wraps(from_local)
    def new_from_local(*args: Any, **options: Any) -> DTensor:
        old = {"support_uneven", "async_input"} & options.keys()
        return (conversion.from_local if old else from_local)(*args, **options)

    setattr(new_redistribute, MARK, True)
    patched: Any = DTensor
    patched.redistribute, patched.to_local = new_redistribute, new_to_local
    patched.from_local = staticmethod(new_from_local)


def disable_jit_script() -> None:
    """Make ``torch.jit.script`` return what it is given, with a ``UserWarning``.

    Scripted functions refuse DTensors. Call it before the modules are imported that use the
    decorator.
    """
    if hasattr(torch.jit.script, MARK):
        return

    @functools.wraps(torch.jit.script)
    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"torch.jit.script is switched off by disable_jit_script(): {obj!r} stays Python.",
            stacklevel=2,
        )
        return obj

    setattr(script, MARK, True)
    torch.jit.script = script


def deprecated_function(function: Callable) -> Callable:
    """Return ``function``, which gives a ``DeprecationWarning`` at every call."""

    @functools.wraps(function)
    def warned(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"{function.__name__} is deprecated.", DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return warned


def switch_dtensor_for_torch_export(exported: torch.export.ExportedProgram) -> Any:
    """Return ``exported`` as it is: its DTensors are PyTorch's already."""
    return exported
