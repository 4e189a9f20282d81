# SPDX-License-Identifier: Apache-2.0
"""The one home of torch's private names; each comment says on which version it was checked."""

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Checked on 2.13: the type that torch's code knows to wait for, by ``wait`` or ``trigger_wait``.
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import (
    DeviceMesh,
    _mesh_resources,  # checked on 2.13: get_current_mesh()
)
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Placement

# Checked on 2.13: a spec is a plain object (free attributes), hashed by mesh, placements and meta.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Checked on 2.13: (shape, mesh, placements) and (local tensor, mesh, placements); for upstream's
# import path, whose functions of these names know ragged placements too.
from torch.distributed.tensor._utils import (
    compute_global_tensor_info,
    compute_local_shape_and_global_offset,
)

# Checked on 2.13: a Shard that a later mesh axis has cut before; for upstream's import path.
from torch.distributed.tensor.placement_types import _StridedShard

# Checked on 2.13: the type lists behind the default ``foreach=None`` of optimizers and of
# ``clip_grad_norm_``; torch appends its own DTensor to them in the same way.
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _clip_types

# Checked on 2.13: the documented base class of dispatch modes has no public home.
from torch.utils._python_dispatch import TorchDispatchMode

# Checked on 2.13: (type, function, tree) maps the leaves of that type; torch's documentation of
# wrapper subclasses uses it.
from torch.utils._pytree import tree_map_only

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "TensorMeta",
    "TorchDTensor",
    "TorchDispatchMode",
    "_StridedShard",
    "all_gather_single",
    "compile_cuda_kernel",
    "compute_global_tensor_info",
    "compute_local_shape_and_global_offset",
    "current_backward",
    "current_mesh",
    "enable_foreach",
    "enable_subclass_dispatch",
    "foreach_norm",
    "from_local",
    "from_local_needs_gradient",
    "implicit_replication_enabled",
    "kernel",
    "list_kernel",
    "make_wrapper",
    "on_backward_end",
    "reduce_scatter_single",
    "replace_tensor_impl",
    "spec_with_meta",
    "strided_shard_indices",
    "torch_op_handlers",
    "tree_map_only",
    "wrap",
]

# Checked on 2.13: (cls, local_tensor, spec, *, requires_grad) builds the wrapper without running
# ``__init__``; sizes and strides come from ``spec.tensor_meta``, dtype and device from the local
# tensor; fills the slots ``_local_tensor`` and ``_spec``.
wrap: Any = TorchDTensor.__new__


# Checked on 2.13: (cls, size, *, strides, dtype, device) makes a tensor without memory.
make_wrapper = torch.Tensor._make_wrapper_subclass

# Checked on 2.13: (tensors, ord, dtype) -> list of norms.
foreach_norm = torch._foreach_norm

# Public, under two names: 2.13 renamed them and warns on the old ones.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


_from_local_options = inspect.signature(TorchDTensor.from_local).parameters


def from_local(
    local: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    *,
    grad_placements: Sequence[Placement] | None = None,
    **options: Any,
) -> TorchDTensor:
    """Call torch's ``from_local``, which on 2.11 has no ``grad_placements``."""
    if grad_placements is not None:
        if "grad_placements" not in _from_local_options:
            raise NotImplementedError(
                f"from_local(grad_placements={tuple(grad_placements)}) with plain placements "
                f"needs torch 2.13, and this is {torch.__version__}; leave it out, and "
                "redistribute the gradient."
            )
        options["grad_placements"] = grad_placements
    return TorchDTensor.from_local(local, mesh, placements, **options)


# Checked on 2.11, whose ``from_local`` fails in backward when its result got no gradient, and on
# 2.13, where it does not.
from_local_needs_gradient = "grad_placements" not in _from_local_options


def current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost ``with mesh:`` block."""
    try:
        return _mesh_resources.get_current_mesh()
    except RuntimeError as error:
        raise RuntimeError(
            "there is no current mesh: pass device_mesh=, or make this call inside `with mesh:`."
        ) from error


def current_backward() -> int:
    """Return the id of the backward pass that this thread runs, -1 outside of any.

    Checked on 2.13.
    """
    return torch._C._current_graph_task_id()


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that runs now has ended. Checked on 2.13."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def implicit_replication_enabled() -> bool:
    """Tell whether torch's ``implicit_replication()`` context is active. Checked on 2.13."""
    return bool(TorchDTensor._op_dispatcher._allow_implicit_replication)


def kernel(operator: Callable) -> Callable:
    """Return what ``operator(...)`` forwards to, a third faster to call. Checked on 2.13."""
    return getattr(operator, "_op", operator)


@functools.cache
def list_kernel(operator: Any) -> Callable:
    """Return torch's Python function of a ``_foreach_`` or ``_fused_`` operator, else the operator.

    The function reads lists of tensors in half the time. Checked on 2.13.
    """
    name = operator._schema.name.removeprefix("aten::")
    return getattr(torch, name, None) or kernel(operator)


def enable_foreach(cls: type[torch.Tensor]) -> None:
    """Let optimizers and ``clip_grad_norm_`` choose foreach for tensors of type ``cls``."""
    lists: tuple[list, ...] = (_optimizer_types, _clip_types)
    for supported in lists:
        if cls not in supported:
            supported.append(cls)


def enable_subclass_dispatch(cls: type[torch.Tensor]) -> object | None:
    """Route operators on ``cls`` to its ``__torch_dispatch__`` on torch 2.11.

    That release sends every DTensor subclass to its C++ fast path. A rule registered with the
    public ``torch.library.register_torch_dispatch`` is looked up before it. The returned library
    owns the rules: keep it alive. From 2.12 on nothing is needed and None is returned.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12):
        return None

    def rule(_: Any, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        return cls.__torch_dispatch__(func, types, args, kwargs)

    library = torch.library.Library("aten", "FRAGMENT")
    for name in torch._C._dispatch_get_all_op_names():  # checked on 2.11, the only user
        if name.startswith("aten::"):
            torch.library.register_torch_dispatch(name, cls, rule, lib=library)
    return library


def replace_tensor_impl(tensor: torch.Tensor, fresh: torch.Tensor) -> None:
    """Give the object ``tensor`` the C++ half of ``fresh``; its hooks stay. Checked on 2.13.

    Unlike the public ``torch.utils.swap_tensors`` this allows weak references to ``tensor`` (they
    keep pointing at the same Python object). A saved AccumulateGrad node of ``tensor`` would
    write to the old half, so such a tensor is refused.
    """
    if tensor._use_count() > 1:  # type: ignore[attr-defined]  # of C++, not in the stub
        raise RuntimeError(
            "cannot move this tensor between meta and a real device while an autograd graph "
            "holds it; finish or drop the backward pass first."
        )
    hooks, post_hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, fresh)
    if hooks is not None:
        tensor._backward_hooks = hooks
    if post_hooks is not None:
        tensor._post_accumulate_grad_hooks = post_hooks


def spec_with_meta(
    spec: DTensorSpec, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Return ``spec`` for another tensor of the same mesh and placements.

    Ten times faster than the constructor, whose checks do not depend on the metadata. Checked on
    2.13: a spec has no slots, and ``_hash`` is a lazy cache.
    """
    new = object.__new__(DTensorSpec)
    attributes = new.__dict__
    attributes.update(spec.__dict__)
    attributes["tensor_meta"] = TensorMeta(shape, stride, dtype)
    attributes["_hash"] = None
    return new


def torch_op_handlers() -> dict:
    """Return torch's table of operators that its DTensor hands to a function of their own.

    A function is called as ``handler(operator, args, kwargs)`` with DTensors among the arguments,
    below autograd. Checked on 2.13.
    """
    return TorchDTensor._op_dispatcher._custom_op_handlers


def strided_shard_indices(
    placement: _StridedShard, length: int, ranks: int, rank: int
) -> np.ndarray:
    """Return the indices [kept] of a dim of ``length`` that ``placement`` leaves on ``rank``.

    Checked on 2.13: the placement splits a tensor on its ``dim``.
    """
    index = torch.arange(length).view(*[1] * placement.dim, -1)
    parts, _ = placement._split_tensor(index, ranks, with_padding=False, contiguous=True)
    return parts[rank].reshape(-1).numpy()


def compile_cuda_kernel(source: str, name: str) -> Callable:
    """Compile a CUDA kernel that includes curand's header; ``kernel(grid, block, args)`` runs it.

    Checked on 2.13 by reading alone: an int among ``args`` becomes a C int, a float a double.
    Raises RuntimeError where the header is not found.
    """
    found = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (found and found.submodule_search_locations) or ()]
    folders = [folder for root in roots for folder in sorted(root.glob("*/include"))]
    folders += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    folders += [folder / "cccl" for folder in folders]
    if not any((folder / "curand_kernel.h").exists() for folder in folders):
        raise RuntimeError(
            "curand_kernel.h was not found among the nvidia packages nor in CUDA_HOME; install "
            "nvidia-curand or the CUDA toolkit, or leave cuda_replay off."
        )
    return torch.cuda._compile_kernel(source, name, cuda_include_dirs=[*map(str, folders)])
