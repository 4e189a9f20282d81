# SPDX-License-Identifier: Apache-2.0
"""From the gradients that autograd leaves on full parameters to the sharded ``.grad``.

A reduction has up to two collectives: a reduce-scatter over the ranks that shard, and then an
all-reduce of the result over the ranks that repeat it. The second one may be put off: the result
waits, and later ones are added to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vescale.fsdp._torch_compat import averages
from vescale.fsdp.collectives import Collectives
from vescale.fsdp.data_mesh import DataMesh
from vescale.fsdp.gradients import GradientBuffer
from vescale.fsdp.lanes import AnyPlan
from vescale.fsdp.managed import Managed
from vescale.fsdp.offload import HostCopies
from vescale.fsdp.sharded_gradients import ShardedGradients


@dataclass
class ReduceOptions:
    """What the user may change about the reductions of a unit, between two backwards."""

    sync: bool = True  # reduce at all; without, gradients add up unsharded
    all_reduce: bool = True  # also over the replicas; without, results of the first step add up
    divide_factor: float | None = None  # None: the number of data-parallel ranks
    force_sum: bool = False  # never let a collective average
    in_flight: int = 1  # reductions that may run at once when this one starts, itself included
    hook: Callable[[torch.Tensor], None] | None = None  # gets the result [S], to change in place
    hook_stream: torch.Stream | None = None


@dataclass(frozen=True)
class Scaling:
    """How a sum over all ranks becomes a mean: factors around it, or collectives that average."""

    before: float  # for all that is sent
    average: bool
    after: float  # for this rank's part of the sum


def scaling_of(options: ReduceOptions, ranks: int, dtype: torch.dtype, average: bool) -> Scaling:
    """Return the scaling of a reduction over ``ranks`` in ``dtype``.

    ``average``: whether the backend can. float16 is divided before the sum can overflow, and by
    no more than the number of ranks, so that little is lost below its smallest number.
    """
    divisor = float(ranks if options.divide_factor is None else options.divide_factor)
    if dtype == torch.float16:
        return Scaling(1.0 / ranks, False, ranks / divisor)
    if average and not options.force_sum and divisor == ranks:
        return Scaling(1.0, True, 1.0)
    return Scaling(1.0, False, 1.0 / divisor)


class Reduction:
    """Collect, reduce and hand over the gradients of one group.

    ``dtype`` is that of the sharded parameters and so of their ``.grad``. With ``copies`` this is
    on the host, and gets its values in ``settle``.
    """

    def __init__(
        self,
        managed: Sequence[Managed],
        plan: AnyPlan,
        data: DataMesh,
        options: ReduceOptions,
        *,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        device: torch.device,
        collectives: Collectives,
        copies: HostCopies | None = None,
    ) -> None:
        self._plan, self._data, self._managed = plan, data, managed
        self.options = options
        self._dtype, self._reduce_dtype, self._device = dtype, reduce_dtype, device
        self._collectives = collectives
        self._buffer: GradientBuffer | None = None
        self._scaling: Scaling | None = None  # of the reduce-scatter under way
        self._deferred = False  # whether its result will wait for the replicas
        self._arrived: torch.Tensor | None = None  # its result, if it had to be waited for early
        self._owed = False  # whether a backward without sync left gradients, here or elsewhere
        self._reduced: torch.Tensor | None = None  # after it, [S + flags], maybe in an all-reduce
        self._work: dist.Work | None = None
        self._after = 1.0
        self._partial: torch.Tensor | None = None  # what waits for the all-reduce, scaled
        self._used: set[int] = set()  # the tensors that had a gradient here
        self._results = ShardedGradients(managed)
        self._copies = copies
        # A result on its way to the host, and the tensors without a gradient in it.
        self._leaving: tuple[torch.Tensor, torch.Event, set[int]] | None = None

    @property
    def waits(self) -> bool:
        """Whether gradients wait here for a reduction, or for the rest of one."""
        return self._partial is not None or self._written or self._owed

    @property
    def under_way(self) -> bool:
        """Whether a reduction runs whose result is not in ``.grad`` yet, nor waits."""
        return self._scaling is not None or self._reduced is not None

    @property
    def _written(self) -> bool:
        return self._buffer is not None and bool(self._buffer.written)

    @property
    def due(self) -> bool:
        """Whether a reduction now would bring gradients on."""
        under_way = self._scaling is not None  # and will take what was put off along
        put_off = self._partial is not None and self.options.all_reduce
        return self._written or self._owed or (put_off and not under_way)

    def put_off(self) -> None:
        """Note that a backward has passed without a reduction, so that the next one has it.

        Every rank calls it alike: this one may have had no gradient where another had some.
        """
        self._owed = True

    def take(self, index: int, grad: torch.Tensor) -> None:
        """Write the gradient of full parameter ``index`` into the buffer, or add it."""
        self.collect()  # from this very buffer, if the parameter is used once more
        self._gradients().write(index, grad)

    def use(self, collectives: Collectives) -> None:
        """Reduce over the sharding ranks with ``collectives`` from the next reduction on."""
        self._collectives = collectives
        if self._buffer is not None:
            self._buffer.use(collectives)

    def _gradients(self) -> GradientBuffer:
        if self._buffer is None:
            self._buffer = GradientBuffer(
                self._plan,
                self._data.shard_group,
                dtype=self._reduce_dtype,
                device=self._device,
                collectives=self._collectives,
            )
        return self._buffer

    # --- the two collectives ----------------------------------------------------------------

    def start(self) -> None:
        """Launch the reduce-scatter; its payload is always the same."""
        self.finish()
        self._owed = False
        buffer = self._gradients()
        self._used |= buffer.written
        can_average = averages(self._data.groups[0], self._device)
        self._scaling = scaling_of(self.options, self._data.ranks, self._reduce_dtype, can_average)
        self._deferred = self._data.replicate_axis is not None and not self.options.all_reduce
        buffer.start(average=self._scaling.average, scale=self._scaling.before)

    def advance(self) -> bool:
        """Wait for the reduce-scatter under way, if any, and launch the all-reduce that follows.

        Returns whether something is left to ``finish``.
        """
        if self._scaling is not None:
            self.collect()
            scaling, self._scaling = self._scaling, None
            reduced, self._arrived = self._arrived, None
            average = scaling.average
            self._after = scaling.after
            if self._deferred or self._partial is not None:
                self._add_partial(reduced, scaling)
                if self._deferred:
                    return False
                reduced, self._partial = self._partial, None
                average, self._after = False, 1.0
            self._reduced = reduced
            if self._data.replicas > 1 and reduced.numel():
                op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
                group = self._data.replicate_group
                self._work = dist.all_reduce(reduced, op=op, group=group, async_op=True)
        return self._reduced is not None

    def collect(self) -> None:
        """Wait for the reduce-scatter under way, if any.

        What follows it is left to ``advance``: when gradients come, ranks may differ.
        """
        if self._scaling is not None and self._arrived is None:
            self._arrived = self._buffer.finish()

    def _add_partial(self, reduced: torch.Tensor, scaling: Scaling) -> None:
        """Add a result to those that wait, in the widest dtype: each would round away some more.

        What is added still has to be summed over the replicas, and no more than that.
        """
        wide = reduced.to(torch.promote_types(self._reduce_dtype, self._dtype))
        factor = 1.0 / self._data.replicas if scaling.average else scaling.after
        if factor != 1.0:
            self._buffer.values(wide).mul_(factor)
        self._partial = wide if self._partial is None else self._partial.add_(wide)

    def finish(self) -> None:
        """Put the result of the reduction under way, if any, into the sharded ``.grad``.

        A parameter for which no rank had a gradient keeps the ``.grad`` it had.
        """
        if not self.advance():
            return
        if self._work is not None:
            self._work.wait()
            self._work = None
        reduced, self._reduced = self._reduced, None
        used_here, self._used = self._used, set()
        unused = set()
        # With a gradient for everything here, no rank found one unused: nothing to look up. A hook
        # may have brought gradients from ranks of which the flags know nothing.
        foreign = self.options.hook is not None and self._data.replicate_axis is None
        if len(used_here) < len(self._managed) and not foreign:
            unused = self._buffer.unused(reduced)
        reduced = self._scaled(reduced)
        if self._copies is None:
            self._results.add(reduced, self._buffer.shard_views(reduced), unused)
            return
        self.settle()
        self._leaving = (*self._copies.to_host(reduced, self.settle), unused)

    def settle(self) -> None:
        """Wait for what is on its way to the host, if anything, and put it into ``.grad``."""
        if self._leaving is not None:
            (result, event, unused), self._leaving = self._leaving, None
            event.synchronize()
            self._results.add(result, self._buffer.shard_views(result), unused)

    def _scaled(self, reduced: torch.Tensor) -> torch.Tensor:
        """Return the result in the dtype of ``.grad``, scaled, and changed by the user's hook."""
        narrow = self._reduce_dtype == torch.float16
        late = narrow or self.options.force_sum  # as in FSDP2; else the hook sees the mean
        if not late:
            self._scale(reduced)
        if self.options.hook is not None:
            self._run_hook(self.options.hook, self._buffer.values(reduced))
        if narrow:
            reduced = reduced.to(self._dtype)  # the factor may be too large for float16
        if late:
            self._scale(reduced)
        return reduced.to(self._dtype)

    def _scale(self, reduced: torch.Tensor) -> None:
        if self._after != 1.0:
            reduced.mul_(self._after)  # the flags too, which have been read

    def _run_hook(self, hook: Callable[[torch.Tensor], None], values: torch.Tensor) -> None:
        stream = self.options.hook_stream
        if stream is None:
            hook(values)
            return
        device = torch.get_device_module(self._device)
        here = device.current_stream()
        stream.wait_stream(here)
        with device.stream(stream):
            hook(values)
        here.wait_stream(stream)

    def forget_results(self) -> None:
        """Hold no reference to sharded gradients, not even a weak one."""
        self._results.forget()

    def drop(self) -> None:
        """Wait for the collective under way, and forget it and what waits for a reduction."""
        self.collect()
        self._scaling = self._arrived = None
        self._owed = False
        if self._work is not None:
            self._work.wait()
        self._work = self._reduced = self._partial = None
        self._used = set()
        if self._buffer is not None:
            self._buffer.drop()
