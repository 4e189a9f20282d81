# SPDX-License-Identifier: Apache-2.0
"""The user's own communication, given as objects of FSDP2's protocols ``AllGather`` and
``ReduceScatter``: ``allocate(size, *, dtype, device)`` and a call on two flat tensors.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vescale.fsdp.collectives import Collectives, Pending, Several


class Comm(Protocol):
    """What both protocols have in common, and what they are called with."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for a call, which may be that of the last one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Communicate; called with ``output_tensor``, ``input_tensor``, ``group``, ``async_op``
        and, to reduce, ``op``. Return what has a ``wait()``, or None."""


class CustomGather(Collectives):
    """Gather with ``comm``, which is called as FSDP2 calls it, its input a part of its output.

    Full parameters stay where they were gathered to until they are freed, and what ``allocate``
    returns may be used for the next unit before that. So it is memory on the way only, and is
    copied from; ``in_place`` never asks for it and gathers to where the parameters are.
    """

    def __init__(self, group: dist.ProcessGroup | None, comm: Comm, *, in_place: bool) -> None:
        super().__init__(group)
        self._comm, self._in_place = comm, in_place

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Pending | None:
        """Gather ``source`` [S] of every rank into ``output`` [N * S]; may be its own part."""
        earlier = _on_the_way.get(id(self._comm))
        if earlier is not None:
            earlier.wait()  # it may be in the very memory that comes next
        target = output if self._in_place else _allocate(self._comm, output)
        part = target.narrow(0, self.group.rank() * source.numel(), source.numel())
        if part.data_ptr() != source.data_ptr():
            part.copy_(source)
        work = self._comm(output_tensor=target, input_tensor=part, group=self.group, async_op=True)
        if self._in_place:
            return work
        copy = _on_the_way[id(self._comm)] = _Then(work, lambda: output.copy_(target), self._comm)
        return copy

    def _launch(self, calls: Sequence[Callable[[], Pending | None]]) -> Pending:
        return _one_by_one(calls, in_place=self._in_place)


class CustomReduce(Collectives):
    """Reduce with ``comm``, which is called as FSDP2 calls it.

    Gradients are written as autograd produces them, also while an earlier reduction still runs in
    memory that ``allocate`` returned. So that is memory on the way only, and is copied to and from;
    ``in_place`` never asks for it and sends from where the gradients are.
    """

    def __init__(self, group: dist.ProcessGroup | None, comm: Comm, *, in_place: bool) -> None:
        super().__init__(group)
        self._comm, self._in_place = comm, in_place

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: dist.ReduceOp.RedOpType
    ) -> Pending | None:
        """Reduce ``source`` [N * S] over the ranks, and keep this rank's part in ``output`` [S]."""
        sent, result = source, output
        if not self._in_place:
            sent, result = _allocate(self._comm, source), _allocate(self._comm, output)
            sent.copy_(source)
        work = self._comm(
            output_tensor=result, input_tensor=sent, group=self.group, op=op, async_op=True
        )
        return work if self._in_place else _Then(work, lambda: output.copy_(result), sent)

    def _launch(self, calls: Sequence[Callable[[], Pending | None]]) -> Pending:
        return _one_by_one(calls, in_place=self._in_place)


def _one_by_one(calls: Sequence[Callable[[], Pending | None]], *, in_place: bool) -> Pending:
    """Call the user's function for each lane; memory that it allocates may be that of the last."""
    works: list[Pending | None] = []
    for call in calls:
        if works and works[-1] is not None and not in_place:
            works[-1].wait()
        works.append(call())
    return Several(works[-1:] if not in_place else works)


class GroupMemory:
    """torch's own collectives, in memory of ``allocator``. One object serves both protocols."""

    def __init__(self, allocator: Callable[..., torch.Tensor]) -> None:
        self._allocator = allocator

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory of the process group, flat."""
        return self._allocator(math.prod(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType | None = None,
        async_op: bool = False,
    ) -> Pending | None:
        """Gather, or reduce where an ``op`` is given; always asynchronously."""
        collectives = Collectives(group)
        if op is None:
            return collectives.all_gather(output_tensor, input_tensor)
        return collectives.reduce_scatter(output_tensor, input_tensor, op)


class _Then:
    """Waits, and then finishes on the current stream; ``held`` is kept alive until then."""

    def __init__(self, work: Pending | None, finish: Callable[[], Any], *held: Any) -> None:
        self._work, self._finish, self._held = work, finish, held

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            with torch.no_grad():
                self._finish()
        self._work = self._finish = self._held = None


# The last gather in memory of a comm, by the comm's id, while it has not been waited for.
_on_the_way: weakref.WeakValueDictionary[int, _Then] = weakref.WeakValueDictionary()


def _allocate(comm: Comm, like: torch.Tensor) -> torch.Tensor:
    """Return memory of ``comm`` for a flat ``like``; raises ValueError if it does not fit."""
    given = comm.allocate((like.numel(),), dtype=like.dtype, device=like.device)
    wanted = like.dtype, like.device, like.numel()
    if (given.dtype, given.device, given.numel()) != wanted or not given.is_contiguous():
        raise ValueError(
            f"{type(comm).__name__}.allocate() returned {given.dtype} {tuple(given.shape)} on "
            f"{given.device} with strides {given.stride()}, expected a contiguous {like.dtype} "
            f"({like.numel()},) on {like.device}."
        )
    return given.view(-1)
