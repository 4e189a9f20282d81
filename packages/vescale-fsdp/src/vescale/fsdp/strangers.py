# SPDX-License-Identifier: Apache-2.0
"""Parameters that came into a model after ``fully_shard``: nobody shards or reduces them."""

import warnings
from collections.abc import Iterable, Sequence

from torch import nn

from vescale.fsdp.unit import Unit

NAMED = 5  # in the warning


def warn_of_strangers(modules: Sequence[nn.Module], units: Iterable[Unit]) -> None:
    """Warn of trainable parameters under ``modules`` that no unit holds, or was told to ignore."""
    known = set()
    for unit in units:
        known |= {id(param) for ref in unit.ignored if (param := ref()) is not None}
        for group in unit.groups:
            for item in group.managed:
                known |= {id(item.sharded), id(item.gathered)}
    names = [
        name
        for module in modules
        for name, param in module.named_parameters()
        if param.requires_grad and id(param) not in known
    ]
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        warnings.warn(
            f"{', '.join(names[:NAMED])}{more}: these parameters came into the model after "
            "fully_shard. They are not sharded, and each rank trains them with its own gradients: "
            "add modules, such as adapters, before fully_shard, or pass what is meant to be so in "
            "ignored_params.",
            UserWarning,
            stacklevel=2,
        )
