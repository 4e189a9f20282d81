# SPDX-License-Identifier: Apache-2.0
"""A flat buffer of gradients, and its buckets, which are reduced over data parallel ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.legacy._errors import LegacyStateError
from vescale.legacy._torch_compat import reduce_scatter_single
from vescale.legacy.ddp.layout import lay_out
from vescale.legacy.dtensor.redistribution import redistribute_dtensor

__all__ = ["Bucket", "GradBuffer", "local_of"]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or a plain tensor, without its history."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Bucket:
    """Gradients of some parameters, ``data`` [numel]: gathered, reduced once, and waited for."""

    def __init__(
        self,
        data: torch.Tensor,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        scatter: bool,
    ) -> None:
        self.data, self.parameters, self.group, self.scatter = data, parameters, group, scatter
        self._late: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.reset()

    @property
    def own(self) -> slice:
        """The elements of ``data`` that this rank owns: an equal part for each rank."""
        numel = self.data.numel() // self.group.size()
        start = self.group.rank() * numel
        return slice(start, start + numel)

    def reset(self) -> None:
        """Forget what has come and what was reduced."""
        self.arrived: set[nn.Parameter] = set()
        self.started = self.finished = False
        self._work: Any = None
        self._reduced: torch.Tensor | None = None
        self._late.clear()

    def add(self, parameter: Any, once: bool) -> None:
        """Move ``parameter.grad`` into the buffer. ``RuntimeError`` after its reduction began."""
        if self.started or (once and parameter in self.arrived):
            raise LegacyStateError(
                "Cannot set grad twice: a second backward began before zero_grad() or "
                "zero_grad_buffer(); call it, or accumulate with overlap_grad_reduce=False and "
                "reduce by finish_grad_sync()."
            )
        self.arrived.add(parameter)
        grad, parameter.grad = parameter.grad, None
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            # A sum over tensor parallel ranks, as of a norm under sequence parallel: let it run.
            grad = redistribute_dtensor(grad, placements=parameter.placements)
            self._late.append((parameter, grad.to_local()))
        else:
            parameter.main_grad.add_(local_of(grad))

    @property
    def complete(self) -> bool:
        """Whether each parameter has a gradient."""
        return len(self.arrived) == len(self.parameters)

    def start(self) -> None:
        """Start the reduction: the mean, whole, or with ``scatter`` this rank's part."""
        self.started = True
        parameter: Any
        for parameter, grad in self._late:
            parameter.main_grad.add_(grad)
        self._late.clear()
        self.data.div_(self.group.size())
        if self.scatter:
            self._reduced = torch.empty_like(self.data[self.own])
            self._work = reduce_scatter_single(
                self._reduced, self.data, group=self.group, async_op=True
            )
        else:
            self._work = dist.all_reduce(self.data, group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait for the reduction. Does nothing the second time."""
        if self.finished:
            return
        self._work.wait()
        if self._reduced is not None:
            self.data[self.own].copy_(self._reduced)
            self._reduced = None
        self.finished = True


class GradBuffer:
    """The gradients of parameters of one gradient dtype, as one tensor ``data`` [numel].

    Each parameter's ``main_grad`` is a view of it, of the shape of its local part.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        bucket_numel: int | None,
        scatter: bool,
    ) -> None:
        self.parameters, self.dtype = list(parameters), dtype
        divisor = group.size() if scatter else 1
        local = [local_of(parameter) for parameter in self.parameters]
        self.layout = lay_out([part.numel() for part in local], bucket_numel, divisor)
        self.data = torch.zeros(self.layout.numel, dtype=dtype, device=local[0].device)
        parameter: Any
        for parameter, part, slot in zip(self.parameters, local, self.layout.slots, strict=True):
            parameter.main_grad = self.data[slot.start : slot.end].view(part.shape)
        slots = list(zip(self.parameters, self.layout.slots, strict=True))
        self.buckets = [
            Bucket(
                self.data[start:end],
                [parameter for parameter, slot in slots if slot.bucket == index],
                group,
                scatter,
            )
            for index, (start, end) in enumerate(self.layout.buckets)
        ]

    def index_map(self) -> dict[nn.Parameter, tuple[int, int, int]]:
        """Return {parameter: (start, end, number of its bucket)}."""
        slots = zip(self.parameters, self.layout.slots, strict=True)
        return {parameter: (slot.start, slot.end, slot.bucket) for parameter, slot in slots}
