# SPDX-License-Identifier: Apache-2.0
"""Say in a few characters what a value is: shapes and placements, never contents."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.legacy._torch_compat import OpOverload

# What runs between the line a user wrote and the operation it became.
MACHINERY = ("torch", "vescale", "contextlib", "functools", "typing_extensions")


def describe(value: Any) -> str:
    """Return a short text for ``value``; tensors as dtype[shape], containers item by item."""
    if isinstance(value, DTensor):
        placements = ", ".join(str(placement) for placement in value.placements)
        mesh = _mesh(value.device_mesh)
        return f"DTensor {_tensor(value)} ({placements}) on {mesh}"
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, DeviceMesh):
        return f"mesh {_mesh(value)}"
    if isinstance(value, dist.ProcessGroup):
        return f"{value.group_desc} {dist.get_process_group_ranks(value)}"
    if isinstance(value, torch.ScriptObject):
        return str(value._type()).rpartition(".")[2]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(describe(item) for item in value) + "]"
    return value if isinstance(value, str) else repr(value)


def name_of(func: Any) -> str:
    """Return the name a collective or an operator is known by."""
    if isinstance(func, str):
        return func
    return str(func) if isinstance(func, OpOverload) else func.__name__


def call_site() -> str:
    """Return file:line of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] not in MACHINERY:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd thread"  # where backward of an accelerator runs; no user's frame is below


def _tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _mesh(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or range(mesh.ndim)
    axes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    return f"{mesh.device_type}({axes})"
