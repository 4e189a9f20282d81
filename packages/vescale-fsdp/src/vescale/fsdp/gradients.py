# SPDX-License-Identifier: Apache-2.0
"""The gradient buffer of one group: written as autograd produces, reduced as a whole.

The payload of the reduction is fixed by the layout, never by the data: a tensor without a gradient
sends zeros. Behind each rank's part travels one flag per tensor of the group, 1 where the sender
had a gradient, so that after the one reduction every rank alike knows whether any rank had one.
"""

import math

import torch
import torch.distributed as dist

from vescale.fsdp._torch_compat import foreach_add_, foreach_copy_, foreach_zero_
from vescale.fsdp.collectives import Collectives, Pending
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.lanes import AnyPlan
from vescale.fsdp.slices import flags_numel


class _Place:
    """Where a gradient of ``shape`` goes: ``pieces`` [n] or [ranks, n] of the buffer, in order."""

    def __init__(self, pieces: list[torch.Tensor], shape: torch.Size) -> None:
        row = math.prod(shape[1:])
        self._sizes: list[int] | None = None
        self._flat = False
        if len(pieces) == 1 and pieces[0].is_contiguous():
            self._views = [pieces[0].view(shape)]
        elif row and all(piece.ndim == 1 and piece.numel() % row == 0 for piece in pieces):
            self._views = [piece.view(-1, *shape[1:]) for piece in pieces]
            self._sizes = [len(view) for view in self._views]
        else:
            self._views, self._flat = pieces, True
            self._sizes = [piece.numel() for piece in pieces]

    def write(self, grad: torch.Tensor, *, add: bool) -> None:
        """Copy ``grad``, or ``add`` it to what is there."""
        if self._sizes is None:
            self._views[0].add_(grad) if add else self._views[0].copy_(grad)
            return
        parts = (grad.reshape(-1) if self._flat else grad).split(self._sizes)
        if self._flat:
            pairs = zip(parts, self._views, strict=True)
            parts = [part if view.ndim == 1 else part.view(view.shape) for part, view in pairs]
        if self._views:
            (foreach_add_ if add else foreach_copy_)(self._views, parts)


class GradientBuffer:
    """Collect the gradients of one group in ``dtype`` and reduce them to this rank's shard."""

    def __init__(
        self,
        plan: AnyPlan,
        group: dist.ProcessGroup | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        collectives: Collectives | None = None,
    ) -> None:
        self._buffer = DBuffer(
            plan,
            group,
            dtype=dtype,
            device=device,
            tail=flags_numel(plan),
            collectives=collectives,
        )
        self._pieces: list[list[torch.Tensor]] | None = None
        self._places: dict[int, _Place] = {}
        self._work: Pending | None = None
        self.dtype = dtype
        self.written: set[int] = set()

    def use(self, collectives: Collectives) -> None:
        """Reduce with ``collectives`` from the next reduction on."""
        self._buffer.collectives = collectives

    def write(self, index: int, grad: torch.Tensor) -> None:
        """Add ``grad`` (any shape, numel of tensor ``index``): one pass over it, cast included."""
        self._allocate()
        with torch.no_grad():
            if grad.layout is not torch.strided:
                grad = grad.to_dense()
            place = self._places.get(index)
            if place is None:
                place = self._places[index] = _Place(self._pieces[index], grad.shape)
            place.write(grad, add=index in self.written)
        self.written.add(index)

    def _allocate(self) -> None:
        buffer = self._buffer
        buffer.allocate_full()
        if self._pieces is None:  # valid for good: the storage shrinks and grows, and stays
            plan = buffer.plan
            self._pieces = [
                buffer.pieces(offset, request.numel)
                for offset, request in zip(plan.offsets, plan.requests, strict=True)
            ]
            self._padding = [p for gap in buffer.slices.gaps() for p in buffer.pieces(*gap)]
            self._flags = buffer.tails()

    def start(self, *, average: bool = False, scale: float = 1.0) -> None:
        """Launch the reduction over the ranks: the sum, or the ``average``, of all tensors.

        Before it they are multiplied by ``scale``. Needs a backend that averages to ``average``.
        """
        self._allocate()
        buffer = self._buffer
        unused = [i for i in range(len(self._pieces)) if i not in self.written]
        empty = [piece for index in unused for piece in self._pieces[index]]
        if empty or self._padding:
            foreach_zero_([*self._padding, *empty])
        if scale != 1.0:
            buffer.full.mul_(scale)
        self._flags.fill_(1)
        if unused and self._flags.numel():  # none where no tensor has elements
            self._flags[:, unused] = 0
        self.written = set()
        self._work = buffer.reduce_scatter(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)

    def finish(self) -> torch.Tensor:
        """Wait for the reduction, free the full buffer and return the reduced part [S + flags]."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._buffer.free_full()
        shard, self._buffer.shard = self._buffer.shard, None
        return shard

    def values(self, shard: torch.Tensor) -> torch.Tensor:
        """Return what ``finish`` returned without the flags: [S], a view."""
        return shard[: self._buffer.plan.shard_numel]

    def unused(self, shard: torch.Tensor) -> set[int]:
        """Return the tensors for which no rank had a gradient, from what ``finish`` returned.

        The same on every rank. Waits for the device.
        """
        plan = self._buffer.plan
        flags = shard[plan.shard_numel :].tolist()
        # Tensors without elements have no flag in a group that has nothing to reduce.
        return {i for i, flag in enumerate(flags[: len(plan.requests)]) if flag == 0}

    def shard_views(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's part of every tensor, flat, as views of what ``finish`` returned."""
        return self._buffer.shard_views(shard)

    def drop(self) -> None:
        """Forget what was written; no reduction may be under way."""
        self._buffer.free_full()
        self.written = set()
