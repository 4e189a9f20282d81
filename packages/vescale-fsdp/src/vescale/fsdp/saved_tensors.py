# SPDX-License-Identifier: Apache-2.0
"""Notice every use of full parameters in backward, however the loss was made.

Hooks on a module's outputs miss a loss that is built from an intermediate, or an output inside an
object that nobody can look into. Autograd's own saved tensors miss nothing: what a forward saves
and lies in a group's full buffer brings the group back when backward asks for it.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from vescale.dtensor.tensor import local_of
from vescale.fsdp._torch_compat import top_saved_tensor_hooks

_PLAIN = (torch.Tensor, torch.nn.Parameter)


# Full buffers that have memory now, by its address, and whom to tell about a use in backward.
_Owner = tuple[weakref.ref[torch.Tensor], weakref.WeakMethod]
_owners: dict[int, _Owner] = {}


def watch(buffer: torch.Tensor, on_use: Callable[[], None]) -> None:
    """Call the bound method ``on_use`` whenever backward needs a tensor saved from ``buffer``.

    ``buffer`` is a whole storage that has memory now; call ``unwatch`` before it is given back.
    Tensors saved in between stay watched. Both are held weakly: what is saved is the place in the
    buffer, so that whoever else refers to its memory can be told apart.
    """
    owner = weakref.ref(buffer), weakref.WeakMethod(on_use)
    _owners[buffer.untyped_storage().data_ptr()] = owner


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


class _Place(NamedTuple):
    """A saved tensor that is a view of a watched buffer."""

    owner: _Owner
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


def _pack(tensor: torch.Tensor) -> Any:
    owner, memory = None, tensor
    if isinstance(tensor, DTensor):  # a tensor-parallel parameter, or a view of one
        memory = local_of(tensor)
    if type(memory) in _PLAIN and memory.layout is torch.strided:
        owner = _owners.get(memory.untyped_storage().data_ptr())
    # The version, because torch checks none where hooks are in force.
    if owner is not None and memory is tensor and _is_view(tensor, owner[0]()):
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        return _Place(owner, *place, tensor._version)
    if tensor.grad_fn is not None:
        tensor = tensor.detach()  # its node would hold it, and it its node
    return owner, tensor, _version(tensor, owner)


def _version(tensor: torch.Tensor, owner: _Owner | None) -> int:
    """Return a number that grows with each write to ``tensor``, or to the buffer that it is in."""
    buffer = owner[0]() if owner is not None else None
    return tensor._version + (buffer._version if buffer is not None else 0)


def _is_view(tensor: torch.Tensor, buffer: torch.Tensor | None) -> bool:
    if buffer is None or tensor.dtype != buffer.dtype:
        return False
    if tensor._version != buffer._version:  # the local part of a DTensor: it counts by itself
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def _unpack(saved: Any) -> torch.Tensor:
    if type(saved) is _Place:
        tensor, version = _in_place(saved), saved.version
        now = tensor._version
    else:
        owner, tensor, version = saved
        if owner is not None:
            _tell(owner)
        now = _version(tensor, owner)
    if now != version:
        raise RuntimeError(
            "a tensor that backward needs was modified by an inplace operation after the forward "
            f"saved it: shape {tuple(tensor.shape)}, saved at version {version}, now at version "
            f"{now}; clone it before the modification, or, if it is a parameter, run "
            "backward before optimizer.step() or load_state_dict()."
        )
    return tensor


def _tell(owner: _Owner) -> None:
    call = owner[1]()
    if call is not None:
        call()


def _in_place(saved: _Place) -> torch.Tensor:
    buffer = saved.owner[0]()
    if buffer is None:
        raise RuntimeError(
            "backward needs full parameters of a wrapped module that was deleted, moved or cast "
            f"after its forward: shape {tuple(saved.size)}; run backward before that."
        )
    _tell(saved.owner)
    with torch.no_grad():
        return buffer.as_strided(saved.size, saved.stride, saved.offset)
