# SPDX-License-Identifier: Apache-2.0
"""Reduce later: results marked here stay partial until an operation needs their value."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from vescale.legacy._torch_compat import tree_leaves, tree_map_only
from vescale.legacy.dtensor.placement_types import Placement
from vescale.legacy.dtensor.redistribution import redistribute_dtensor

__all__ = ["DeferReshardMode", "dummy_p2p"]

# A sum of partial values is partial: these need no value. Their scalar arguments are weights.
LINEAR = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
# These ask about a tensor, not for its value.
ASKING = (torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.numel)


class DeferReshardMode(TorchFunctionMode):
    """While open, ``defer(x, placements)`` returns ``x`` as it is, to be resharded at first use.

    Sums of deferred tensors with one wish are deferred themselves, so that two partial results
    that are added are reduced once. What nothing used stays as it is; ``resolve`` reshards it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._later: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def defer(self, x: DTensor, placements: Sequence[Placement], async_op: bool = True) -> DTensor:
        """Return ``x``, to be brought to ``placements`` at its first use but in a sum."""
        self._later[x] = (tuple(placements), async_op)
        return x

    def resolve(self, tree: Any) -> Any:
        """Return ``tree`` with its deferred tensors resharded."""
        return tree_map_only(DTensor, self._resolved, tree)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._later or func in ASKING or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        # Torch names no DTensor in ``types``: its class has no function handler of its own.
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        wishes = [self._later.get(x) for x in tensors]
        if func in LINEAR and None not in wishes and len(set(wishes)) == 1 and len(wishes) > 1:
            return self.defer(func(*args, **kwargs), *wishes[0])
        args, kwargs = self.resolve((args, kwargs))
        return func(*args, **kwargs)

    def _resolved(self, x: DTensor) -> DTensor:
        wish = self._later.get(x)
        if wish is None:
            return x
        placements, async_op = wish
        return redistribute_dtensor(x, x.device_mesh, placements, async_op)


def dummy_p2p(send_or_receive: Callable) -> Callable:
    """Return the function, which does nothing and returns None where ``VESCALE_DUMMY_P2P=1``."""

    @functools.wraps(send_or_receive)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("VESCALE_DUMMY_P2P", "0") == "1":
            return None
        return send_or_receive(*args, **kwargs)

    return maybe
