# SPDX-License-Identifier: Apache-2.0
"""What the user may change about how one unit communicates, and the collectives that follow."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from vescale.fsdp._torch_compat import is_gloo
from vescale.fsdp.collectives import Collectives
from vescale.fsdp.direct_collectives import DirectCollectives

KINDS = ("auto", "torch", "direct")


@dataclass
class CommOptions:
    """The choices for one parameter group, between two steps."""

    kind: str = "auto"  # direct on gloo with CPU tensors, else torch's

    def gathering(self, group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
        """Return the collectives that gather parameters over ``group``."""
        return self._collectives(group, device)

    def reducing(self, group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
        """Return the collectives that reduce gradients over ``group``."""
        return self._collectives(group, device)

    def _collectives(self, group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
        direct = self.kind == "direct" or (self.kind == "auto" and can_be_direct(group, device))
        return DirectCollectives(group) if direct else Collectives(group)


def can_be_direct(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Tell whether ``DirectCollectives`` can serve tensors on ``device`` in ``group``."""
    return group is not None and device.type == "cpu" and is_gloo(group, device)
