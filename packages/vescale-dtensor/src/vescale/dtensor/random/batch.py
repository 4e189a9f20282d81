# SPDX-License-Identifier: Apache-2.0
"""Which part of the data of all ranks a plain tensor is, while a ``scope`` says so."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed.tensor import Placement

from vescale.dtensor.random.parts import Strip, strips_inside


@dataclass(frozen=True)
class Batch:
    """Samples of all ranks along ``dim``: this rank has ``count`` of ``total``, from ``first``."""

    dim: int
    first: int
    count: int
    total: int

    def factor(self, shape: Sequence[int]) -> int:
        """Return how many indices of ``dim`` a sample takes in a tensor of ``shape``."""
        length = shape[self.dim]
        if self.count == 0 or length % self.count:
            raise ValueError(
                f"a random operator on a tensor of shape {tuple(shape)} inside random.scope(), "
                f"where dim {self.dim} holds the {self.count} samples of this rank: it must be a "
                "multiple of them; leave the scope for tensors that are no part of the batch."
            )
        return length // self.count

    def whole(
        self, shape: Sequence[int], stride: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
        """Return what one device has for a dense tensor of ``shape`` and ``stride``: its shape, its
        strides, and its dims from the slowest to the fastest in memory."""
        whole = list(shape)
        whole[self.dim] = self.total * self.factor(shape)
        # A dim of one element may lie anywhere, but for the samples, of which others have more:
        # right inside of the dim whose stride they share, as strides are what torch leaves of it.
        places = [(1, 0)] * len(shape)
        for dim, length in enumerate(shape):
            if length > 1 or dim == self.dim:
                places[dim] = (-stride[dim], dim == self.dim)
        order = sorted(range(len(shape)), key=lambda dim: places[dim])
        strides, step = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim] = step
            step *= whole[dim]
        return tuple(whole), tuple(strides), order

    def strips(
        self,
        whole: Sequence[int],
        shape: Sequence[int],
        order: Sequence[int],
        placements: Sequence[Placement],
        mesh_shape: Sequence[int],
        coordinate: Sequence[int] | None,
    ) -> list[Strip]:
        """Return what this rank holds of ``whole``: its samples, ``shape``, cut by ``placements``.

        Raises NotImplementedError for ragged placements.
        """
        start = self.first * self.factor(shape)
        return strips_inside(
            whole, (self.dim, start), shape, placements, mesh_shape, coordinate, order
        )


_active: Batch | None = None


def active() -> Batch | None:
    """Return the batch whose part is drawn right now, if one is."""
    return _active


@contextmanager
def activate(batch: Batch) -> Iterator[None]:
    """Let fills draw parts of ``batch``, for the duration of one operator."""
    global _active
    before, _active = _active, batch
    try:
        yield
    finally:
        _active = before
