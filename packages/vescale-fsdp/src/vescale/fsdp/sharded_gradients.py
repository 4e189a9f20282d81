# SPDX-License-Identifier: Apache-2.0
"""Reduced gradients on their way into the ``.grad`` of sharded parameters."""

import weakref
from collections.abc import Sequence

import torch

from vescale.dtensor.tensor import make_ragged
from vescale.fsdp._torch_compat import gradient_hooks, post_accumulate_hooks
from vescale.fsdp.managed import Managed


class ShardedGradients:
    """Set or add to ``.grad``, and run the hooks that users registered on the parameters."""

    def __init__(self, managed: Sequence[Managed]) -> None:
        self._managed = managed
        # The buffer behind the present gradients, and these; weak: zero_grad() must free them.
        self._last: tuple[weakref.ref, list[weakref.ref]] | None = None

    def forget(self) -> None:
        """Hold no reference to gradients, not even a weak one."""
        self._last = None

    def add(self, reduced: torch.Tensor, views: Sequence[torch.Tensor], unused: set[int]) -> None:
        """Give each parameter its gradient: the view of the buffer ``reduced`` that is its part.

        Parameters in ``unused``, by index, keep the ``.grad`` that they had.
        """
        if unused or not self._add_whole(reduced):
            self._add_each(reduced, views, unused)
        for index, item in enumerate(self._managed):
            if index not in unused:
                for hook in post_accumulate_hooks(item.sharded):
                    hook(item.sharded)

    def _add_whole(self, reduced: torch.Tensor) -> bool:
        """Add to the last result as one buffer, if the parameters still hold all of it."""
        if self._last is None:
            return False
        buffer = self._last[0]()
        intact = buffer is not None and all(
            item.sharded.grad is not None
            and item.sharded.grad is grad()
            and not gradient_hooks(item.sharded)
            for item, grad in zip(self._managed, self._last[1], strict=True)
        )
        if not intact:
            self._last = None
            return False
        buffer.add_(reduced)
        return True

    def _add_each(
        self, reduced: torch.Tensor, views: Sequence[torch.Tensor], unused: set[int]
    ) -> None:
        fresh = not unused
        for index, (item, view) in enumerate(zip(self._managed, views, strict=True)):
            if index in unused:
                continue
            sharded = item.sharded
            grad = make_ragged(item.form(view), item.spec)
            for hook in gradient_hooks(sharded):
                replaced = hook(grad)
                grad = grad if replaced is None else replaced
            if sharded.grad is None:
                sharded.grad = grad
            else:
                fresh = False
                with torch.no_grad():
                    sharded.grad += grad
        self._last = None
        if fresh:
            grads = [weakref.ref(item.sharded.grad) for item in self._managed]
            self._last = (weakref.ref(reduced), grads)
