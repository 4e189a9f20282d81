# SPDX-License-Identifier: Apache-2.0
"""Reduce the gradients that backward leaves partial, as those of norms under sequence parallel."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.legacy.dtensor.placement_types import Replicate

__all__ = ["GradSync", "partial_gradients"]

BUCKET_NBYTES = 40_000_000


def partial_gradients(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) of those whose gradient is a partial DTensor."""
    return [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if isinstance(parameter.grad, DTensor)
        and any(placement.is_partial() for placement in parameter.grad.placements)
    ]


@dataclass
class _Bucket:
    parameters: list[Any]
    flat: torch.Tensor
    work: Any


class GradSync:
    """The all-reduces of one module's partial gradients, between ``start`` and ``finish``."""

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start reducing gradients over the first mesh dim on which each is partial.

        Those alike in mesh, mesh dim, reduction and dtype travel together, up to 40,000,000 bytes;
        a larger one travels alone. ``RuntimeError`` when a sync has started and not finished.
        """
        if self._buckets:
            raise RuntimeError("a gradient sync is under way; call finish_grad_sync() first.")
        groups: dict[Any, list[Any]] = {}
        for parameter in parameters:
            grad: Any = parameter.grad
            axis = _partial_axes(grad)[0]
            key = (grad.device_mesh, axis, grad.placements[axis].reduce_op, grad.dtype)
            groups.setdefault(key, []).append(parameter)
        for (mesh, axis, op, _), members in groups.items():
            for bucket in _buckets(members):
                flat = torch.cat([p.grad.to_local().reshape(-1) for p in bucket])
                reduce_op = getattr(dist.ReduceOp, op.upper())
                work = dist.all_reduce(flat, reduce_op, mesh.get_group(axis), async_op=True)
                self._buckets.append(_Bucket(bucket, flat, work))

    def finish(self) -> None:
        """Wait, and put replicated gradients in the place of the partial ones."""
        buckets, self._buckets = self._buckets, []
        again = []
        parameter: Any
        for bucket in buckets:
            bucket.work.wait()
            sizes = [parameter.grad.to_local().numel() for parameter in bucket.parameters]
            for parameter, flat in zip(bucket.parameters, bucket.flat.split(sizes), strict=True):
                grad = parameter.grad
                placements = [*grad.placements]
                placements[_partial_axes(grad)[0]] = Replicate()
                parameter.grad = DTensor.from_local(
                    flat.view(grad.to_local().shape),
                    grad.device_mesh,
                    placements,
                    run_check=False,
                    shape=grad.shape,
                    stride=grad.stride(),
                )
                if _partial_axes(parameter.grad):
                    again.append(parameter)
        if again:  # partial on several mesh dims: one after the other
            self.start(again)
            self.finish()


def _partial_axes(grad: DTensor) -> list[int]:
    return [axis for axis, placement in enumerate(grad.placements) if placement.is_partial()]


def _buckets(parameters: list[Any]) -> Iterable[list[Any]]:
    bucket: list[Any] = []
    nbytes = 0
    for parameter in parameters:
        size = parameter.grad.to_local().nbytes
        if bucket and nbytes + size > BUCKET_NBYTES:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(parameter)
        nbytes += size
    if bucket:
        yield bucket
