# SPDX-License-Identifier: Apache-2.0
"""How flat buffers travel between the ranks of one process group.

A ``Collectives`` is what a buffer asks; other ways of communicating are subclasses of it.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vescale.fsdp._torch_compat import all_gather_flat, coalescing, reduce_scatter_flat


class Pending(Protocol):
    """What has been launched. It goes on, and keeps its memory, also if nobody waits."""

    def wait(self) -> Any:
        """Have the current stream, or this thread where there is none, wait for the end."""


class Collectives:
    """torch's own flat collectives over ``group``. All are launched asynchronously.

    Each returns what to wait for, or None where it is done already. Its arguments must stay as
    they are, and its output has no contents, until then.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def over(self, group: dist.ProcessGroup) -> "Collectives":
        """Return the same way of communicating between the ranks of another ``group``."""
        other = copy.copy(self)
        other.group = group
        return other

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Pending | None:
        """Gather ``source`` [S] of every rank into ``output`` [N * S]; may be its own part."""
        return all_gather_flat(output, source, group=self.group, async_op=True)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: dist.ReduceOp.RedOpType
    ) -> Pending | None:
        """Reduce ``source`` [N * S] over the ranks, and keep this rank's part in ``output`` [S]."""
        return reduce_scatter_flat(output, source, op=op, group=self.group, async_op=True)

    # --- several at once --------------------------------------------------------------------

    def gather_lanes(
        self, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> Pending | None:
        """Gather each of ``sources`` into the one of ``outputs``, as ``all_gather`` does."""
        if len(outputs) == 1:
            return self.all_gather(outputs[0], sources[0])
        return self._launch(
            [
                functools.partial(self.all_gather, output, source)
                for output, source in zip(outputs, sources, strict=True)
            ]
        )

    def reduce_lanes(
        self,
        outputs: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        op: dist.ReduceOp.RedOpType,
    ) -> Pending | None:
        """Reduce each of ``sources`` into the one of ``outputs``, as ``reduce_scatter`` does."""
        if len(outputs) == 1:
            return self.reduce_scatter(outputs[0], sources[0], op)
        return self._launch(
            [
                functools.partial(self.reduce_scatter, output, source, op)
                for output, source in zip(outputs, sources, strict=True)
            ]
        )

    def _launch(self, calls: Sequence[Callable[[], Pending | None]]) -> Pending | None:
        """Make collectives of one kind as one launch of the backend."""
        with coalescing(self.group) as work:
            for call in calls:
                call()
        return work


class Several:
    """Waits for all of ``works``, in order."""

    def __init__(self, works: Sequence[Pending | None]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait()
        self._works = []
