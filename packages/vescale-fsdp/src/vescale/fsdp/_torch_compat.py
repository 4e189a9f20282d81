# SPDX-License-Identifier: Apache-2.0
"""The one home of torch-private names of this package; checked on torch 2.11 and 2.13."""

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointFunction

# Public, but renamed in torch 2.13, which warns about the names that 2.11 and 2.12 know.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@functools.cache
def leave_untraced(*functions: Callable) -> None:
    """Let torch.compile leave the code of ``functions`` alone, but compile what they call.

    Not at import: it loads the compiler, as making any optimizer does.
    """
    from torch._dynamo.decorators import skip

    for function in functions:
        skip(function)


@functools.cache
def untraced(function: Callable) -> Callable:
    """Return ``function`` such that torch.compile neither enters it nor what it calls."""
    return torch.compiler.disable(function)


def call_untraced(function: Callable, *args: Any) -> Any:
    """Return ``function(*args)``, run past torch.compile: for hooks that autograd calls."""
    return untraced(_call)(function, *args)


def _call(function: Callable, *args: Any) -> Any:
    return function(*args)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the counter by which autograd notices writes to ``tensor`` and its views."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def storage_references(tensor: torch.Tensor) -> int:
    """Return how many tensors and others hold the memory of ``tensor``."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def current_backward() -> int:
    """Return the id of the backward pass that this thread runs, -1 outside of any."""
    return torch._C._current_graph_task_id()


def will_execute(node: torch.autograd.graph.Node) -> bool:
    """Tell whether the backward pass that runs now will come to ``node``."""
    return torch._C._will_engine_execute_node(node)


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that runs now has ended; raises outside of one."""
    Variable._execution_engine.queue_callback(functools.partial(untraced(_call), callback))


def reentrant_checkpoint() -> FrameType | None:
    """Return the frame of the outermost ``torch.utils.checkpoint`` with ``use_reentrant=True``
    whose forward runs now, None outside of any. It runs once more in backward."""
    found, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            found = frame
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return found


def is_newest(node: torch.autograd.graph.Node) -> bool:
    """Tell whether this thread has made no other node of a graph since ``node``."""
    return node._sequence_nr() == torch.autograd._get_sequence_nr() - 1


def top_saved_tensor_hooks() -> tuple[Callable, Callable] | None:
    """Return the (pack, unpack) default hooks in force: ours, checkpointing's, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def averages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether the group's backend for ``device`` reduces with ``ReduceOp.AVG`` itself."""
    return group._get_backend(device).name() == "nccl"


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a collective of ``group`` waits before it fails; the shortest of its
    backends."""
    backends = [group._get_backend(device) for device in group._device_types]
    return min(backend.options._timeout for backend in backends)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store by which the ranks of ``group`` met."""
    return group.get_group_store()


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether the group's backend for ``device`` is gloo."""
    return group._get_backend(device).name() == "gloo"


def backend_allocator(
    group: dist.ProcessGroup, device: torch.device
) -> Callable[..., torch.Tensor] | None:
    """Return the function (numel, *, dtype, device) by which the group's backend allocates memory
    on ``device`` for its collectives, None where it has none."""
    backend = group._get_backend(device)
    return backend.allocate_tensor if backend.supports_tensor_alloc(device) else None


def coalescing(group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    """Make the flat collectives of one kind that are called inside as one launch of the backend.

    Yields what to wait for afterwards, by its ``wait()``.
    """
    return dist._coalescing_manager(group, async_ops=True)


def device_for(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors the group's collectives take; the CPU where they do."""
    devices = sorted(group._device_types, key=lambda device: device.type != "cpu")
    return devices[0]


def is_fake(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether the group only pretends to communicate (torch's fake process group)."""
    return group._get_backend(device).name() == "fake"


def post_accumulate_hooks(param: torch.Tensor) -> list[Callable]:
    """Return what ``register_post_accumulate_grad_hook`` registered on ``param``, in order."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def gradient_hooks(param: torch.Tensor) -> list[Callable]:
    """Return what ``register_hook`` registered on the leaf ``param``, in order."""
    return list((param._backward_hooks or {}).values())


# Checked on 2.13: (tensors, ord, dtype) -> list of norms; (tensors, scalar tensor) in place.
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
# In place, with a cast where dtypes differ: (tensors, tensors of the same shapes); (tensors).
foreach_copy_, foreach_zero_ = torch._foreach_copy_, torch._foreach_zero_
# And (tensors, number) or (tensors, tensors); without the underscore they return new tensors.
foreach_add_ = torch._foreach_add_
foreach_sub, foreach_sub_ = torch._foreach_sub, torch._foreach_sub_
foreach_mul, foreach_sqrt = torch._foreach_mul, torch._foreach_sqrt
foreach_div, foreach_div_ = torch._foreach_div, torch._foreach_div_


def profiler_runs() -> bool:
    """Tell whether torch's profiler records ranges now, or hands them to NVTX or ITT."""
    return torch.autograd.profiler._is_profiler_enabled


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return ``mesh``, which has names, as a mesh of one axis named after all of its axes.

    Makes a process group the first time; a mesh remembers those that were flattened from it.
    """
    return mesh._flatten()


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the axes of both, which are axes of one mesh with names.

    Raises RuntimeError where they overlap or have no mesh in common. Makes no process group.
    """
    return DeviceMesh._concatenate([first, second])
