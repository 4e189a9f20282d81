# SPDX-License-Identifier: Apache-2.0
"""Collectives for gloo on CPU tensors, made of its messages between pairs of ranks.

gloo's own reduce-scatter is a copy of everything, an all-reduce of it, and one more copy, and its
gather copies everything once more too. Here each part travels once, from the rank that has it to
the one that needs it, and straight into its place.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from vescale.fsdp.collectives import Collectives, Pending, Several

GATHER_TAG = 0x7650_0000  # the first of those of gathers, apart from tags that users choose

# Gathers that nobody has waited for yet, in order, by group: gloo drops the message of a work that
# is dropped, and so breaks the connection.
_under_way: weakref.WeakKeyDictionary[dist.ProcessGroup, list["_Gather"]] = (
    weakref.WeakKeyDictionary()
)


class DirectCollectives(Collectives):
    """Gather by messages; reduce by an all-to-all of the parts and a sum in the order of ranks.

    A reduction gives the same bits in every run, and those of one process that adds the ranks'
    gradients in their order. Sums of 16-bit floats are made in float32 and rounded once. It holds
    one more buffer [N * S] until it has been waited for.
    """

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Pending:
        """Gather ``source`` [S] of every rank into ``output`` [N * S]; may be its own part."""
        return _Gather(self.group, output, source)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: dist.ReduceOp.RedOpType
    ) -> Pending | None:
        """Sum ``source`` [N * S] over the ranks, and keep this rank's part in ``output`` [S]."""
        if op != dist.ReduceOp.SUM:
            return super().reduce_scatter(output, source, op)
        return _SumOfParts(self.group, output, source)

    def _launch(self, calls: Sequence[Callable[[], Pending | None]]) -> Pending:
        return Several([call() for call in calls])


def gather_tag(nbytes: int) -> int:
    """Return the tag of messages of ``nbytes``; those of one tag between two ranks keep order.

    Where ranks have come to different units, gloo ends the process at a message of another size
    than expected. For one of another tag it waits, and raises at the timeout.
    """
    return GATHER_TAG + nbytes % 65521  # a prime


class _Gather:
    def __init__(
        self, group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor
    ) -> None:
        self._group = weakref.ref(group)
        self._works: list[dist.Work] = []
        _under_way.setdefault(group, []).append(self)
        rank, size = group.rank(), group.size()
        parts = output.chunk(size)
        tag = gather_tag(source.nbytes)
        # Each rank begins with another peer, so that no rank has to serve all at once.
        for step in range(1, size):
            peer = (rank - step) % size
            self._works.append(group.recv([parts[peer]], peer, tag))
        for step in range(1, size):
            self._works.append(group.send([source], (rank + step) % size, tag))
        if source.data_ptr() != parts[rank].data_ptr():
            parts[rank].copy_(source)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        group = self._group()
        waiting = _under_way.get(group, []) if group is not None else []
        if self in waiting:  # messages keep their order: the gathers before it have ended too
            del waiting[: waiting.index(self) + 1]


class _SumOfParts:
    def __init__(
        self, group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor
    ) -> None:
        self._output = output
        self._parts = torch.empty_like(source).view(group.size(), output.numel())
        # As bytes: gloo sends no complex numbers.
        received, sent = self._parts.view(-1).view(torch.uint8), source.view(torch.uint8)
        self._work = dist.all_to_all_single(received, sent, group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        if self._parts is not None:
            sum_in_order(self._parts, self._output)
        self._parts = None


def sum_in_order(parts: torch.Tensor, output: torch.Tensor) -> None:
    """Set ``output`` [S] to the sum of the rows of ``parts`` [N, S], the first two first.

    So an element's bits do not depend on where it lies. 16-bit floats are added in float32.
    """
    with torch.no_grad():
        if len(parts) <= 4:  # torch adds so few in order, in one pass
            torch.sum(parts, 0, dtype=output.dtype, out=output)
            return
        narrow = output.dtype.itemsize < 4
        total = torch.empty_like(output, dtype=torch.float32) if narrow else output
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        if narrow:
            output.copy_(total)
