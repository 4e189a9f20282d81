# SPDX-License-Identifier: Apache-2.0
"""The gradient buffer of one group: written as autograd produces, reduced as a whole.

The payload of the reduction is fixed by the layout, never by the data: a tensor without a gradient
sends zeros. They are negative zeros, while what is written is free of them (x + 0.0 turns -0.0 into
+0.0 and nothing else), and in IEEE arithmetic a sum is -0.0 only if every addend is. So a rank can
tell after the one reduction whether *any* rank had a gradient, at no cost in bytes.
"""

import torch
import torch.distributed as dist

from vescale.fsdp._torch_compat import averages
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.planner import Plan

UNUSED = -0.0


class GradientBuffer:
    """Collect the gradients of one group in ``dtype`` and reduce them to this rank's shard."""

    def __init__(
        self, plan: Plan, group: dist.ProcessGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._buffer = DBuffer(plan, group, dtype=dtype, device=device)
        self._gaps = self._buffer.gaps()
        self._averages = averages(group, device)
        self.dtype = dtype
        self.written: set[int] = set()
        self._work: dist.Work | None = None

    def write(self, index: int, grad: torch.Tensor) -> None:
        """Add ``grad`` (any shape, numel of tensor ``index``): one pass over it, cast included."""
        self._buffer.allocate_full()
        with torch.no_grad():
            slot = self._buffer.view(index).view(grad.shape)
            if grad.layout is not torch.strided:
                grad = grad.to_dense()
            if index in self.written:
                slot.add_(grad)
            elif grad.dtype == slot.dtype or grad.is_cuda:
                torch.add(grad, 0.0, out=slot)
            else:  # torch.add would cast into a temporary first on CPU
                slot.copy_(grad).add_(0.0)
        self.written.add(index)

    def start(self, divisor: float) -> None:
        """Launch the reduction: the sum over ranks, divided by ``divisor``, of all tensors."""
        buffer, plan = self._buffer, self._buffer.plan
        full = buffer.allocate_full()
        for start, numel in self._gaps:
            full.narrow(0, start, numel).zero_()
        for index, request in enumerate(plan.requests):
            if request.numel and index not in self.written:
                buffer.view(index).fill_(UNUSED)
        op, self._scale = dist.ReduceOp.SUM, 1.0 / divisor
        if self._averages and divisor == plan.world_size:
            op, self._scale = dist.ReduceOp.AVG, 1.0
        elif self.dtype == torch.float16:  # divide before the sum can overflow
            full.mul_(self._scale)
            self._scale = 1.0
        self._work = buffer.reduce_scatter(op=op, async_op=True)

    def finish(self) -> torch.Tensor:
        """Wait for the reduction, free the full buffer and return the reduced shard [S]."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._buffer.free_full()
        self.written = set()
        shard, self._buffer.shard = self._buffer.shard, None
        return shard if self._scale == 1.0 else shard.mul_(self._scale)

    def is_unused(self, index: int, shard: torch.Tensor) -> bool:
        """Tell whether no rank had a gradient for tensor ``index``, from a reduced ``shard``.

        Looks at this rank's part only and waits for the device. A rank that holds nothing of the
        tensor answers True; nothing of its own depends on it.
        """
        piece = self._buffer.shard_view(index, shard)
        return bool(((piece == 0) & piece.signbit()).all())

    def drop(self) -> None:
        """Forget what was written; no reduction may be under way."""
        self._buffer.free_full()
        self.written = set()
