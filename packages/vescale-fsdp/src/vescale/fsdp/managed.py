# SPDX-License-Identifier: Apache-2.0
"""One parameter under management: where it is, how it may be cut, and its two forms."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from vescale.fsdp.granularity import Granularity
from vescale.fsdp.planner import Plan, Request, plan

SLICE_ALIGN_BYTES = 16  # slower collectives below it: pytorch/pytorch #195450
OWNER_ATTRIBUTE = "_vescale_owner"  # on a parameter that a group replaced


@dataclass(eq=False)
class Managed:
    """One parameter: its places in modules, and its sharded and gathered forms."""

    fqn: str
    slots: list[tuple[weakref.ref[nn.Module], str]]
    original: nn.Parameter | None
    granularity: Granularity
    spec: object = None
    local: torch.Tensor | None = None  # of the sharded form: a view of the shard
    sharded: nn.Parameter = None
    gathered: nn.Parameter | None = None
    extras: dict = field(default_factory=dict)

    def register(self, param: nn.Parameter) -> None:
        """Put ``param`` into every place, without the checks of ``setattr``."""
        for module_ref, name in self.slots:
            module = module_ref()
            if module is not None:
                module._parameters[name] = param

    def check_registered(self) -> None:
        """Raise RuntimeError if somebody put another parameter into one of the places."""
        for module_ref, name in self.slots:
            module = module_ref()
            if module is None:
                continue
            found = module._parameters.get(name)
            if found is not self.sharded and found is not self.gathered:
                raise RuntimeError(
                    f"{self.fqn}: the parameter was replaced by another object after fully_shard; "
                    "copy values into the sharded parameter (param.copy_, load_state_dict), or "
                    "replace it before fully_shard."
                )


def plan_of(managed: Sequence[Managed], world_size: int, narrowest: torch.dtype) -> Plan:
    """Return the plan of the original parameters over ``world_size`` ranks.

    Every rank's part starts on a multiple of 16 bytes in each dtype the layout is used with,
    ``narrowest`` being the narrowest of them.
    """
    requests = [
        Request(
            item.fqn,
            item.original.numel(),
            item.granularity.block_numel(item.original.shape, fqn=item.fqn),
        )
        for item in managed
    ]
    align = SLICE_ALIGN_BYTES // math.gcd(SLICE_ALIGN_BYTES, narrowest.itemsize)
    return plan(requests, world_size, align=align)
