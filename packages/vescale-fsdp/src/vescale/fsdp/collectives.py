# SPDX-License-Identifier: Apache-2.0
"""How flat buffers travel between the ranks of one process group, and where their memory is from.

A ``Collectives`` is what a buffer asks; other ways of communicating are subclasses of it.
"""

import copy

import torch
import torch.distributed as dist

from vescale.fsdp._torch_compat import all_gather_flat, reduce_scatter_flat


class Collectives:
    """torch's own flat collectives over ``group``. All are launched asynchronously.

    Each returns a work to wait for, or None where it is done already. Its arguments must stay as
    they are, and its output has no contents, until then.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def over(self, group: dist.ProcessGroup) -> "Collectives":
        """Return the same way of communicating between the ranks of another ``group``."""
        other = copy.copy(self)
        other.group = group
        return other

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory [numel] of undefined contents for a buffer that travels."""
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> dist.Work | None:
        """Gather ``source`` [S] of every rank into ``output`` [N * S]; may be its own part."""
        return all_gather_flat(output, source, group=self.group, async_op=True)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: dist.ReduceOp.RedOpType
    ) -> dist.Work | None:
        """Reduce ``source`` [N * S] over the ranks, and keep this rank's part in ``output`` [S]."""
        return reduce_scatter_flat(output, source, op=op, group=self.group, async_op=True)
