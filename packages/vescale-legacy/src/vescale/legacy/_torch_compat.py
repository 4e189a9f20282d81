# SPDX-License-Identifier: Apache-2.0
"""Every name this package takes from torch's private side, and why.

Each is checked on the version named beside it by ``tests/test_torch_compat.py``.
"""

from typing import Any

import torch

# 2.13.0: the type of operators such as ``torch.ops.aten.mm.default`` has no public name.
from torch._ops import OpOverload
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# 2.13.0: the collectives of DTensor carry the name of a group, or the group itself; nothing
# public turns the name back into the group.
from torch.distributed.distributed_c10d import _resolve_process_group

# 2.13.0: the documented base class of dispatch modes has no public home, and nothing public
# tells which mode is on top, which closing a mode outside a ``with`` statement must know.
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "argument_names",
    "as_process_group",
    "mesh_without_groups",
    "top_dispatch_mode",
]


def mesh_without_groups(
    device_type: str, ranks: torch.Tensor, mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    """Return a mesh over ``ranks`` that says who is where and creates no process group.

    No collective; this rank need not be in it. ``get_group`` on it raises ``RuntimeError``
    (message has ``process groups not initialized!``).
    """
    # 2.13.0: ``_init_backend=False`` is what torch's own slices are made with. The public
    # constructor would create groups, so every rank would have to build every mesh, in step.
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, _init_backend=False)


def argument_names(op: OpOverload) -> list[str]:
    """Return the names of an operator's arguments, in the order of its schema."""
    return [argument.name for argument in op._schema.arguments]  # 2.13.0: no public accessor


def as_process_group(value: Any) -> Any:
    """Return the group that a collective's group argument stands for; unknown kinds as given."""
    if isinstance(value, str):
        return _resolve_process_group(value)
    if isinstance(value, torch.ScriptObject):  # 2.13.0: how the c10d operators receive it
        return ProcessGroup.unbox(value)
    return value


def top_dispatch_mode() -> TorchDispatchMode | None:
    """Return the dispatch mode entered last in this thread and not yet left, or None."""
    return _get_current_dispatch_mode()
