# SPDX-License-Identifier: Apache-2.0
"""Methods of a wrapped module that change how and when its gradients are reduced."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vescale.fsdp.arguments import check_bool
from vescale.fsdp.units import ModuleMixin, reduce_options_of, unit_of, units_of


class ReduceSettings(ModuleMixin):
    """Mixed into ``FSDPModule``."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reduces gradients; without, they add up unsharded.

        Gradient accumulation that communicates once costs a full gradient buffer per unit. Also
        sets what ``set_requires_all_reduce`` sets.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        check_bool("recurse", recurse)
        for options in reduce_options_of(self, recurse):
            options.sync = options.all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backward reduces gradients over the replicas too (hybrid sharding).

        Without, each backward reduces over the sharding ranks only and the result is kept, in the
        wider of reduction and parameter dtype: a buffer of the size of the sharded gradients. The
        next backward with it on adds what was kept, and sets ``.grad``. No effect without replicas.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        check_bool("recurse", recurse)
        for options in reduce_options_of(self, recurse):
            options.all_reduce = requires_all_reduce

    def reduce_gradients(self) -> None:
        """Reduce the gradients that ``no_sync`` left waiting, here and in all modules within.

        For accumulation whose last backward cannot be told beforehand, such as that of a pipeline's
        schedule: run it inside of ``no_sync``, then call this on every rank. Sets or adds to
        ``.grad``; that of a parameter which no rank used stays as it is. Raises RuntimeError inside
        of a forward or backward.
        """
        schedule = unit_of(self).schedule
        if schedule is None:
            return  # no forward yet
        every = reduce_options_of(self, recurse=True)
        before = [options.all_reduce for options in every]
        for options in every:
            options.all_reduce = True
        try:
            schedule.reduce_now([u for u in units_of(self, recurse=True) if u.schedule is schedule])
        finally:
            for options, all_reduce in zip(every, before, strict=True):
                options.all_reduce = all_reduce

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divide sums of gradients by ``factor`` instead of the number of data-parallel ranks.

        ``factor`` is a positive number; 1 gives the sum. Raises ValueError for any other.
        """
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not number or not 0 < factor < math.inf:
            raise ValueError(
                f"the gradient divide factor is {factor!r}, expected a positive number, such as "
                "the number of ranks that see different data."
            )
        check_bool("recurse", recurse)
        for options in reduce_options_of(self, recurse):
            options.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call ``set_gradient_divide_factor``: the old name of FSDP2."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is an old name; call set_gradient_divide_factor.",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool, *, recurse: bool = False) -> None:
        """Choose whether collectives only sum, and means are scaled before or after them."""
        check_bool("enable", enable)
        check_bool("recurse", recurse)
        for options in reduce_options_of(self, recurse):
            options.force_sum = enable

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None] | None,
        *,
        stream: torch.Stream | None = None,
    ) -> None:
        """Call ``hook`` with each reduced gradient buffer of this module; None removes it.

        It gets this rank's part [S] of all gradients of one dtype in one flat tensor of the
        reduction dtype, to change in place, after the reduction over the replicas where the mesh
        has some and after the one over the sharding ranks otherwise. ``stream``, only for a mesh
        without replicas, is where it runs (default: the current stream). On such a mesh the hook
        may bring gradients of other ranks in, so every parameter gets a ``.grad``, used or not.

        Raises TypeError unless ``hook`` can be called and ``stream`` is one; ValueError for a
        ``stream`` with replicas.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"hook is a {type(hook).__name__}, expected a function of one tensor.")
        # Of any device: torch.cpu.Stream is no torch.Stream.
        if stream is not None and not callable(getattr(stream, "wait_stream", None)):
            raise TypeError(
                f"stream is a {type(stream).__name__}, expected a torch.Stream or None."
            )
        groups = unit_of(self).groups
        if stream is not None and any(g.data.replicate_axis is not None for g in groups):
            raise ValueError(
                "stream is given for a mesh with replicas, whose all-reduce is ours; leave it out."
            )
        for group in groups:
            group.reduce_options.hook, group.reduce_options.hook_stream = hook, stream

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the end of backward waits for the last reductions.

        With False the next backward overlaps them, and ``.grad`` is complete only after a backward
        with True, the default. For micro-batches.
        """
        check_bool("is_last_backward", is_last_backward)
        for unit in units_of(self, recurse=True):
            unit.is_last_backward = is_last_backward

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accept True, which is how it always is: unused parameters take part in reductions.

        Ranks may use different parameters. A parameter that no rank used keeps the ``.grad`` it
        had, None after ``zero_grad()``, where FSDP2 gives it zeros. Raises NotImplementedError for
        False: what is sent would depend on what this rank used.
        """
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        check_bool("recurse", recurse)
        if not reduce_scatter_unused_params:
            raise NotImplementedError(
                "set_reduce_scatter_unused_params(False) would reduce only what this rank used, "
                "which hangs where another rank used something else; leave the call out. "
                "Parameters that no rank used have .grad None all the same."
            )


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
