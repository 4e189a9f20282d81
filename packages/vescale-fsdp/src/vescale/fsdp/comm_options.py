# SPDX-License-Identifier: Apache-2.0
"""What the user may change about how one unit communicates, and the collectives that follow."""

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vescale.fsdp._torch_compat import backend_allocator, is_gloo
from vescale.fsdp.collectives import Collectives
from vescale.fsdp.custom_collectives import Comm, CustomGather, CustomReduce, GroupMemory
from vescale.fsdp.direct_collectives import DirectCollectives

KINDS = ("auto", "torch", "direct")

# By the group of the same ranks. Weak: a group that is made anew is another one of that name.
_separate: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class Custom:
    """The user's own communication."""

    comm: Comm
    in_place: bool


@dataclass
class CommOptions:
    """The choices for one parameter group, between two steps."""

    kind: str = "auto"  # direct on gloo with CPU tensors, else torch's
    all_gather: Custom | None = None
    reduce_scatter: Custom | None = None
    group_memory: bool = False  # on the way in memory of the process group, where it has some
    separate: bool = False  # reduce over a process group of its own

    def gathering(self, group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
        """Return the collectives that gather parameters over ``group``."""
        custom = self.all_gather or self._in_group_memory(group, device)
        if custom is not None:
            return CustomGather(group, custom.comm, in_place=custom.in_place)
        return self._builtin(group, device)

    def reducing(self, group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
        """Return the collectives that reduce gradients over the ranks of ``group``."""
        if self.separate and group is not None:
            group = separate_group(group)
        custom = self.reduce_scatter or self._in_group_memory(group, device)
        if custom is not None:
            return CustomReduce(group, custom.comm, in_place=custom.in_place)
        return self._builtin(group, device)

    def _in_group_memory(
        self, group: dist.ProcessGroup | None, device: torch.device
    ) -> Custom | None:
        if not self.group_memory or group is None or device.type == "meta":
            return None
        allocator = backend_allocator(group, device)
        return None if allocator is None else Custom(GroupMemory(allocator), in_place=False)

    def _builtin(self, group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
        direct = self.kind != "torch" and can_be_direct(group, device)
        return DirectCollectives(group) if direct else Collectives(group)


def can_be_direct(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Tell whether ``DirectCollectives`` can serve tensors on ``device`` in ``group``."""
    return group is not None and device.type == "cpu" and is_gloo(group, device)


def separate_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return another process group of the ranks of ``group``, always the same one.

    Made on first use, when all its ranks must call this.
    """
    if group not in _separate:
        ranks = dist.get_process_group_ranks(group)
        _separate[group] = dist.new_group(ranks, use_local_synchronization=True)
    return _separate[group]
