# SPDX-License-Identifier: Apache-2.0
"""Notice every use of full parameters in backward, however the loss was made.

Hooks on a module's outputs miss a loss that is built from an intermediate, or an output inside an
object that nobody can look into. Autograd's own saved tensors miss nothing: what a forward saves
and lies in a group's full buffer brings the group back when backward asks for it.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from vescale.dtensor.tensor import local_of
from vescale.fsdp._torch_compat import top_saved_tensor_hooks

_PLAIN = (torch.Tensor, torch.nn.Parameter)


# Full buffers that have memory now, by its address, and whom to tell about a use in backward.
_owners: dict[int, weakref.WeakMethod] = {}


def watch(buffer: torch.Tensor, on_use: Callable[[], None]) -> None:
    """Call the bound method ``on_use`` whenever backward needs a tensor saved from ``buffer``.

    ``buffer`` has memory now; call ``unwatch`` before it is given back. Tensors saved in between
    stay watched. ``on_use`` is held weakly.
    """
    _owners[buffer.untyped_storage().data_ptr()] = weakref.WeakMethod(on_use)


def unwatch(buffer: torch.Tensor) -> None:
    """Forget ``buffer``, whose memory is about to go."""
    _owners.pop(buffer.untyped_storage().data_ptr(), None)


def others_watch() -> bool:
    """Tell whether hooks of somebody else's are in force: activation checkpointing's, say."""
    top = top_saved_tensor_hooks()
    return top is not None and top[0] is not _pack


def saved_tensor_watch() -> AbstractContextManager:
    """Return the context to run a forward in, so that what it saves is watched.

    Only one pair of saved-tensor hooks is ever in force. Where there is one already, ours or
    somebody else's, the context does nothing: checkpointing must see the tensors it drops.
    """
    if not torch.is_grad_enabled() or top_saved_tensor_hooks() is not None:
        return nullcontext()
    return saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: torch.Tensor) -> Any:
    on_use, memory = None, tensor
    if isinstance(tensor, DTensor):  # a tensor-parallel parameter, or a view of one
        memory = local_of(tensor)
    if type(memory) in _PLAIN and memory.layout is torch.strided:
        on_use = _owners.get(memory.untyped_storage().data_ptr())
    if tensor.grad_fn is not None:
        tensor = tensor.detach()  # its node would hold it, and it its node
    # The version, because torch checks none where hooks are in force.
    return tensor, on_use, tensor._version


def _unpack(saved: tuple[torch.Tensor, weakref.WeakMethod | None, int]) -> torch.Tensor:
    tensor, on_use, version = saved
    if on_use is not None:
        call = on_use()
        if call is not None:
            call()
    if tensor._version != version:
        raise RuntimeError(
            "a tensor that backward needs was modified by an inplace operation after the forward "
            f"saved it: shape {tuple(tensor.shape)}, saved at version {version}, now at version "
            f"{tensor._version}; clone it before the modification."
        )
    return tensor
