# SPDX-License-Identifier: Apache-2.0
"""Methods of a wrapped module that change how and when its parameters are gathered."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vescale.fsdp.arguments import check_bool
from vescale.fsdp.unit import Unit
from vescale.fsdp.units import ModuleMixin, groups_of, unit_of, units_of


class GatherSettings(ModuleMixin):
    """Mixed into ``FSDPModule``."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether forward frees the full parameters, to gather them again in backward."""
        check_bool("reshard_after_forward", reshard_after_forward)
        check_bool("recurse", recurse)
        for unit in units_of(self, recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward frees the full parameters."""
        check_bool("reshard_after_backward", reshard_after_backward)
        check_bool("recurse", recurse)
        for unit in units_of(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether full parameters keep their memory, and so their place, when sharded.

        A gather then writes where the last one did, as a captured CUDA graph needs, at the cost of
        all that memory for good. A move or a cast of the module makes new memory.
        """
        check_bool("keep", keep)
        check_bool("recurse", recurse)
        for group in groups_of(self, recurse):
            group.set_keep_storage(keep)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Choose what to gather ahead when this module's forward starts, in this order.

        Instead of the module that followed it in the last iteration; an empty list goes back to
        that. More than one module takes the memory of all. Call it alike on every rank.
        """
        unit_of(self).forward_prefetch = _prefetches(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Choose what to gather ahead when backward reaches this module, in this order.

        Instead of the module that ended its forward before this one; an empty list goes back to
        that. Call it alike on every rank.
        """
        unit_of(self).backward_prefetch = _prefetches(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward gathers this module's parameters ahead of their use.

        False is for modules whose backward needs no parameter, such as an embedding. Should it need
        one after all, the gather comes then, and later than it could have. Only a part of the
        module's own forward that is checkpointed fails: its recomputation finds nothing gathered.
        """
        check_bool("unshard_in_backward", unshard_in_backward)
        unit_of(self).unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Let the next forward's first gather wait for ``event``, recorded after the optimizer.

        For an optimizer that runs on a stream of its own; the event is waited for once. The current
        stream waits, not the gathers only, so work issued before them is not overtaken. None takes
        back an event that was not waited for yet.
        """
        if event is not None and not callable(getattr(event, "wait", None)):
            raise TypeError(
                f"event={event!r} is a {type(event).__name__}, expected a torch.Event that was "
                "recorded after optimizer.step(), or None."
            )
        unit_of(self).post_optim_event = event

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raise NotImplementedError: gathers do not use symmetric memory yet."""
        raise NotImplementedError(
            f"set_symm_mem_for_comm({backend!r}): gathers do not use symmetric memory yet; leave "
            "the call out, the results are the same."
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept what FSDP2 offers for scripts that call it: every gather is asynchronous here,
        into memory of the current stream."""
        check_bool("async_op", async_op)


def _prefetches(modules: Any) -> list[weakref.ref[Unit]]:
    if not isinstance(modules, (list, tuple)):
        raise TypeError(
            f"modules is a {type(modules).__name__}, expected a list of modules wrapped by "
            "fully_shard."
        )
    units = {id(unit): unit for unit in map(unit_of, modules)}  # one for those wrapped together
    return [weakref.ref(unit) for unit in units.values()]
