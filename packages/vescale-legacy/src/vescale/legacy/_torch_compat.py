# SPDX-License-Identifier: Apache-2.0
"""Every name this package takes from torch's private side, and why.

Each is checked on the version named beside it by ``tests/test_torch_compat.py``.
"""

from typing import Any

import torch
import torch.distributed as dist

# 2.13.0: the type of operators such as ``torch.ops.aten.mm.default`` has no public name.
from torch._ops import OpOverload
from torch.distributed import ProcessGroup

# 2.13.0: the type that torch's code knows to wait for, by ``wait`` or by any use of it.
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import (
    DeviceMesh,
    _mesh_resources,  # 2.13.0: get_current_mesh() is the mesh of the innermost ``with mesh:``
)

# 2.13.0: the collectives of DTensor carry the name of a group, or the group itself; nothing
# public turns the name back into the group.
from torch.distributed.distributed_c10d import _resolve_process_group

# 2.13.0: a spec is a plain object, hashed by mesh, placements and meta; the old API named both.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# 2.13.0: while entered, an operation that would communicate to reshard its inputs raises a
# RuntimeError with ``Implicit redistribution`` in it.
from torch.distributed.tensor._utils import (
    ExplicitRedistributionContext,
    compute_local_shape_and_global_offset,
)

# 2.13.0: cuts a dim into ``split_factor`` pieces first, then each among the ranks: the layout of
# the old InterleavedShard. Torch makes them itself where a view merges dims.
from torch.distributed.tensor.placement_types import _StridedShard

# 2.13.0: the documented base class of dispatch modes has no public home, and nothing public
# tells which mode is on top, which closing a mode outside a ``with`` statement must know.
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

# 2.13.0: (type, function, tree) maps the leaves of that type.
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "ExplicitRedistributionContext",
    "OpOverload",
    "TensorMeta",
    "TorchDispatchMode",
    "_StridedShard",
    "all_gather_single",
    "argument_names",
    "as_process_group",
    "compute_local_shape_and_global_offset",
    "current_mesh",
    "mesh_without_groups",
    "reduce_scatter_single",
    "top_dispatch_mode",
    "tree_leaves",
    "tree_map_only",
]

# Public, under two names: 2.13 renamed them and warns on the old ones.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


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
        return _resolve_process_group(value)  # type: ignore[arg-type]  # a GroupName, which is a str
    if isinstance(value, torch.ScriptObject):  # 2.13.0: how the c10d operators receive it
        return ProcessGroup.unbox(value)
    return value


def top_dispatch_mode() -> TorchDispatchMode | None:
    """Return the dispatch mode entered last in this thread and not yet left, or None."""
    return _get_current_dispatch_mode()


def current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost ``with mesh:`` block; ``RuntimeError`` without one."""
    return _mesh_resources.get_current_mesh()
