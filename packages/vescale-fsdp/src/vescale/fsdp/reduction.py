# SPDX-License-Identifier: Apache-2.0
"""From the gradients that autograd leaves on full parameters to the sharded ``.grad``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vescale.fsdp.data_mesh import DataMesh
from vescale.fsdp.gradients import GradientBuffer
from vescale.fsdp.managed import Managed
from vescale.fsdp.planner import Plan
from vescale.fsdp.sharded_gradients import ShardedGradients


@dataclass
class ReduceOptions:
    """What the user may change about the reductions of a unit, between two backwards."""

    sync: bool = True  # reduce at all; without, gradients add up unsharded
    divide_factor: float | None = None  # None: the number of data-parallel ranks


class Reduction:
    """Collect, reduce and hand over the gradients of one group.

    ``dtype`` is that of the sharded parameters and so of their ``.grad``.
    """

    def __init__(
        self,
        managed: Sequence[Managed],
        plan: Plan,
        data: DataMesh,
        options: ReduceOptions,
        *,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._plan, self._data, self._managed = plan, data, managed
        self.options = options
        self._dtype, self._reduce_dtype, self._device = dtype, reduce_dtype, device
        self._buffer: GradientBuffer | None = None
        self._under_way: set[int] | None = None  # the tensors that had a gradient here
        self._results = ShardedGradients(managed)

    @property
    def waits(self) -> bool:
        """Whether gradients wait in the buffer for a reduction."""
        return self._buffer is not None and bool(self._buffer.written)

    def take(self, index: int, grad: torch.Tensor) -> None:
        """Write the gradient of full parameter ``index`` into the buffer, or add it."""
        self.finish()  # of this very buffer, if the parameter is used once more
        self._gradients().write(index, grad)

    def _gradients(self) -> GradientBuffer:
        if self._buffer is None:
            self._buffer = GradientBuffer(
                self._plan, self._data.shard_group, dtype=self._reduce_dtype, device=self._device
            )
        return self._buffer

    def start(self) -> None:
        """Launch the one reduction; its payload is always the same."""
        buffer = self._gradients()
        self._under_way = set(buffer.written)
        factor = self.options.divide_factor
        buffer.start(float(self._data.ranks if factor is None else factor))

    def finish(self) -> None:
        """Put the result of the reduction under way, if any, into the sharded ``.grad``.

        A parameter for which no rank had a gradient keeps the ``.grad`` it had.
        """
        if self._under_way is None:
            return
        used_here, self._under_way = self._under_way, None
        reduced = self._buffer.finish()
        # With a gradient for everything here, no rank found one unused: nothing to look up.
        all_here = len(used_here) == len(self._managed)
        unused = set() if all_here else self._buffer.unused(reduced)
        reduced = reduced.to(self._dtype)
        self._results.add(reduced, self._buffer.shard_views(reduced), unused)

    def forget_results(self) -> None:
        """Hold no reference to sharded gradients, not even a weak one."""
        self._results.forget()

    def drop(self) -> None:
        """Wait for the reduction under way, and forget it and what waits for one."""
        if self._under_way is not None:
            self._under_way = None
            self._buffer.finish()
        if self._buffer is not None:
            self._buffer.drop()
