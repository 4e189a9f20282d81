# SPDX-License-Identifier: Apache-2.0
"""Count the bytes of plain tensors that live at once, on any device."""

import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # as torch's documentation has it

_MOMENT = 0.002  # seconds


class PeakBytes(TorchDispatchMode):
    """Count the bytes of storages that operators make, and the most that live at once.

    A worker thread of gloo holds the tensors of a collective until a moment after it has said that
    it is done. Before a new peak counts, threads get that moment.
    """

    def __init__(self):
        super().__init__()
        self.live, self.peak, self._known = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage()._cdata for t in args if type(t) is torch.Tensor}
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if type(x) is torch.Tensor and x.untyped_storage()._cdata not in known:
                self._count(x.untyped_storage())
        return out

    def _count(self, storage):
        if storage._cdata in self._known:
            return
        nbytes = storage.nbytes()
        self._known[storage._cdata] = nbytes
        self.live += nbytes
        if self.live > self.peak:
            time.sleep(_MOMENT)
            self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, key):
        self.live -= self._known.pop(key, 0)
