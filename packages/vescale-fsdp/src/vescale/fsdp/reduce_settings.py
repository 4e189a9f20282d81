# SPDX-License-Identifier: Apache-2.0
"""Methods of a wrapped module that change how and when its gradients are reduced."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from vescale.fsdp.arguments import check_bool
from vescale.fsdp.units import reduce_options_of


class ReduceSettings:
    """Mixed into ``FSDPModule``."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reduces gradients; without, they add up unsharded.

        Gradient accumulation that communicates once costs a full gradient buffer per unit.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        check_bool("recurse", recurse)
        for options in reduce_options_of(self, recurse):
            options.sync = requires_gradient_sync


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication inside the context.

    ``module`` may hold wrapped modules without being one. Restores each unit's setting at the
    end, also after an exception. See ``FSDPModule.set_requires_gradient_sync`` for what it costs.
    Raises TypeError for what is no module, ValueError where nothing in it is wrapped.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"no_sync got a {type(module).__name__}, expected a module wrapped by fully_shard."
        )
    every = reduce_options_of(module, recurse=True)
    if not every:
        raise ValueError(
            f"no module in {type(module).__name__} is wrapped; call fully_shard on it first."
        )
    before = [options.sync for options in every]
    for options in every:
        options.sync = False
    try:
        yield
    finally:
        for options, sync in zip(every, before, strict=True):
            options.sync = sync
