# SPDX-License-Identifier: Apache-2.0
"""A collective under way, and a tensor that waits for one on its first use."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vescale.dtensor._torch_compat import AsyncCollectiveTensor, make_wrapper, tree_map_only


class Pending:
    """Collectives that have begun; ``wait()`` ends them and returns what ``finish()`` makes."""

    def __init__(
        self, works: Sequence[dist.Work | None], finish: Callable[[], torch.Tensor]
    ) -> None:
        self._works = works
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._result: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return the result; the second call returns the same tensor at once."""
        if self._finish is not None:
            for work in self._works:
                if work is not None:  # a synchronous collective leaves no work
                    work.wait()
            self._result = self._finish()
            self._works, self._finish = (), None  # frees what was sent
        return self._result


class WaitingTensor(AsyncCollectiveTensor):
    """A tensor whose values ``finish()`` will return; every use of its values waits for them.

    torch's own asynchronous tensor wraps memory that one collective fills. Here the values may
    need a step after it (unpacking, dividing), so views wait too. ``like`` gives the shape, the
    dtype and the device, without memory.
    """

    __slots__ = ("_finish", "_ready")
    _finish: Callable[[], torch.Tensor] | None
    _ready: torch.Tensor

    @staticmethod
    def __new__(
        cls, finish: Callable[[], torch.Tensor], like: torch.Tensor, device: torch.device
    ) -> "WaitingTensor":
        self = make_wrapper(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
        self._finish = finish
        return self

    def wait(self) -> torch.Tensor:
        """Return the values, an ordinary tensor; the same one on every call."""
        if self._finish is not None:
            self._ready, self._finish = self._finish(), None
        return self._ready

    trigger_wait = wait  # the name that torch's code calls

    def _get_acs_underlying_tensor(self) -> torch.Tensor:
        return self.wait()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        return self.wait().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return repr(self.wait())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.wait().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.wait().clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch says TorchFunctionMode
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args, kwargs = tree_map_only(WaitingTensor, WaitingTensor.wait, (args, kwargs or {}))
        return func(*args, **kwargs)


def settled(local: torch.Tensor) -> torch.Tensor:
    """Return ``local`` itself, or what it waits for."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
