# SPDX-License-Identifier: Apache-2.0
"""The gradient buffer of one group: written as autograd produces, reduced as a whole.

The payload of the reduction is fixed by the layout, never by the data: a tensor without a gradient
sends zeros. Behind each rank's part travels one flag per tensor of the group, 1 where the sender
had a gradient, so that after the one reduction every rank alike knows whether any rank had one.
"""

import torch
import torch.distributed as dist

from vescale.fsdp.collectives import Collectives, Pending
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.lanes import AnyPlan


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
        flags = len(plan.requests) if plan.shard_numel else 0
        self._buffer = DBuffer(
            plan,
            group,
            dtype=dtype,
            device=device,
            tail=-(-flags // plan.align) * plan.align,  # keeps every part aligned
            collectives=collectives,
        )
        self._pieces: list[list[torch.Tensor]] | None = None
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
            pieces = self._pieces[index]
            add = index in self.written
            if len(pieces) == 1 and pieces[0].is_contiguous():
                if pieces[0].shape != grad.shape:
                    pieces[0] = pieces[0].view(grad.shape)
                pieces[0].add_(grad) if add else pieces[0].copy_(grad)
            else:
                parts = grad.reshape(-1).split([piece.numel() for piece in pieces])
                for piece, part in zip(pieces, parts, strict=True):
                    part = part.view(piece.shape)
                    piece.add_(part) if add else piece.copy_(part)
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

    def start(self, *, average: bool = False, scale: float = 1.0) -> None:
        """Launch the reduction over the ranks: the sum, or the ``average``, of all tensors.

        Before it they are multiplied by ``scale``. Needs a backend that averages to ``average``.
        """
        self._allocate()
        buffer = self._buffer
        for padding in self._padding:
            padding.zero_()
        unused = [i for i in range(len(self._pieces)) if i not in self.written]
        for index in unused:
            for piece in self._pieces[index]:
                piece.zero_()
        if scale != 1.0:
            buffer.full.mul_(scale)
        flags = buffer.tails()
        flags.fill_(1)
        if unused:
            flags[:, unused] = 0
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
