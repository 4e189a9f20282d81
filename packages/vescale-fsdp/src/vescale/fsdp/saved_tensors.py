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
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from vescale.dtensor.tensor import local_of
from vescale.fsdp._torch_compat import call_untraced, is_newest, top_saved_tensor_hooks

MOST_VIEWS = 1024  # kept for each buffer
_PLAIN = (torch.Tensor, torch.nn.Parameter)


_Geometry = tuple[torch.Size, tuple[int, ...], int | torch.SymInt]  # size, stride, offset


class Watch:
    """Calls the bound method ``on_use`` whenever backward needs a tensor saved from ``buffer``.

    Both are held weakly. What is saved is a place in the buffer, not a view of it, so that whoever
    else refers to its memory can be told apart.
    """

    def __init__(self, buffer: torch.Tensor, on_use: Callable[[], None]) -> None:
        self._buffer, self._on_use = weakref.ref(buffer), weakref.WeakMethod(on_use)
        self._views: dict[_Geometry, torch.Tensor] = {}
        self._address = 0

    @property
    def views(self) -> int:
        """How many views of the buffer are kept here, for backward to use again."""
        return len(self._views)

    @property
    def owner(self) -> object | None:
        """Whose method ``on_use`` is, or None if it is gone."""
        call = self._on_use()
        return getattr(call, "__self__", None)

    @property
    def version(self) -> int:
        """How often the buffer was written to, as autograd counts."""
        return self._buffer()._version

    def start(self) -> None:
        """Watch from now on; the buffer is a whole storage and has memory."""
        self._address = self._buffer().untyped_storage().data_ptr()
        _watches[self._address] = self

    def stop(self) -> None:
        """Watch no longer: the memory is about to go. What was saved stays watched."""
        _watches.pop(self._address, None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether ``tensor``, of the watched memory, is a plain view of the buffer."""
        buffer = self._buffer()
        if buffer is None or tensor.dtype != buffer.dtype:
            return False
        return not (tensor.is_conj() or tensor.is_neg())

    def tell(self) -> None:
        """Have the buffer's contents in place."""
        call = self._on_use()
        if call is not None:
            call_untraced(call)

    def view(self, place: _Geometry) -> torch.Tensor:
        """Return the view of the buffer, its contents in place."""
        self.tell()
        buffer = self._buffer()
        if buffer is None or (buffer.numel() and not buffer.untyped_storage().nbytes()):
            raise RuntimeError(
                "backward needs full parameters of a wrapped module that was deleted, moved or "
                f"cast after its forward: shape {tuple(place[0])}; run backward before that."
            )
        view = self._views.get(place)
        if view is None:
            with torch.no_grad():
                view = buffer.as_strided(*place)
            if len(self._views) < MOST_VIEWS:
                self._views[place] = view
        return view


# Those whose buffer has memory now, by its address.
_watches: dict[int, Watch] = {}


def watched_by(tensor: torch.Tensor) -> object | None:
    """Return whose method watches the buffer that ``tensor`` lies in now, or None."""
    watch = _watch_over(tensor)
    return watch.owner if watch is not None else None


def _watch_over(tensor: torch.Tensor) -> Watch | None:
    # A tensor-parallel parameter, or a view of one, lies there with its local part.
    memory = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    if type(memory) in _PLAIN and memory.layout is torch.strided and memory.numel():
        return _watches.get(memory.untyped_storage().data_ptr())
    return None


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

    watch: Watch
    geometry: _Geometry
    version: int


def _pack(tensor: torch.Tensor) -> Any:
    watch = _watch_over(tensor)
    # Versions, because torch checks none where hooks are in force.
    if watch is not None and not isinstance(tensor, DTensor) and watch.holds(tensor):
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        # Of the buffer: the local part of a DTensor, which this may be, counts by itself.
        return _Place(watch, place, watch.version)
    node = tensor.grad_fn
    if node is not None and (is_newest(node) or isinstance(node, BackwardCFunction)):
        tensor = tensor.detach()  # an output: its node would hold it, and it its node
    return watch, tensor, tensor._version


def _unpack(saved: Any) -> torch.Tensor:
    if type(saved) is _Place:
        tensor, version = saved.watch.view(saved.geometry), saved.version
    else:
        watch, tensor, version = saved
        if watch is not None:
            watch.tell()
    if tensor._version != version:
        raise RuntimeError(
            "a tensor that backward needs was modified by an inplace operation after the forward "
            f"saved it: shape {tuple(tensor.shape)}, saved at version {version}, now at version "
            f"{tensor._version}; clone it before the modification, or, if it is a parameter, run "
            "backward before optimizer.step() or load_state_dict()."
        )
    return tensor


# What autograd calls: nothing to compile.
HOOKS = (_pack, _unpack, _watch_over, Watch.holds, Watch.tell, Watch.view)
