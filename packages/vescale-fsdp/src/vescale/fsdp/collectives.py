# SPDX-License-Identifier: Apache-2.0
"""How flat buffers travel between the ranks of one process group.

A ``Collectives`` is what a buffer asks; other ways of communicating are subclasses of it.
"""

import copy
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vescale.fsdp._torch_compat import all_gather_flat, reduce_scatter_flat


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
