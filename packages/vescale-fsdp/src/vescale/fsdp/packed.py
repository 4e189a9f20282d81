# SPDX-License-Identifier: Apache-2.0
"""Several tensors of any dtype and shape in one gather of bytes."""

from typing import Any

import torch
import torch.distributed as dist

from vescale.fsdp.phases import waiting

ALIGN = 16  # bytes, for every tensor and every rank's part

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Packing:
    """Where every rank's tensors lie in the gathered bytes, and in the memory of the results.

    Tensor ``i`` of all ranks together is [sum of rows, *rest], or [ranks] where each has no dims.
    Ranks may have different numbers of rows, which are exchanged here, once. Collective; raises
    alike on all ranks if one of them brings an ``error``, or shapes that do not fit the others'.
    """

    def __init__(
        self,
        fqn: str,
        inputs: tuple[torch.Tensor, ...],
        error: Exception | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._fqn, self._device = fqn, device
        mine = f"{type(error).__name__}: {error}" if error is not None else _shapes(inputs)
        every: list[Any] = [mine]
        if group is not None and group.size() > 1:
            every = [mine] * group.size()
            with waiting(f"gather of the shapes of {fqn}", group=group):
                dist.all_gather_object(every, mine, group=group)
        self._check(every, error)
        self._mine = mine
        self._every: list[Shapes] = every
        self._starts: list[int] = []
        self.nbytes = 0
        for sent in zip(*every, strict=True):
            self._starts.append(self.nbytes)
            self.nbytes += _aligned(max(_nbytes(shape, dtype) for shape, dtype in sent))
        self._regions: list[tuple[int, int]] = []
        end = 0
        for sent in zip(*every, strict=True):
            size = sum(_nbytes(shape, dtype) for shape, dtype in sent)
            self._regions.append((end, size))
            end += _aligned(size)
        with torch.inference_mode(False):
            self.memory = torch.empty(end, dtype=torch.uint8, device=device)
        self._results = tuple(self._result(i) for i in range(len(self._starts)))

    def _check(self, every: list[Any], error: Exception | None) -> None:
        for rank, shapes in enumerate(every):
            if isinstance(shapes, str):
                raise RuntimeError(
                    f"{self._fqn}: fsdp_pre_all_gather failed on rank {rank} of the sharding "
                    f"group: {shapes}"
                ) from error
        kinds = [[(len(s), s[1:], dtype) for s, dtype in shapes] for shapes in every]
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise RuntimeError(
                    f"{self._fqn}: fsdp_pre_all_gather returned {every[0]} on rank 0 and "
                    f"{every[rank]} on rank {rank} of the sharding group; only the first dim may "
                    "differ between ranks."
                )

    def _result(self, index: int) -> torch.Tensor:
        start, size = self._regions[index]
        shape, dtype = self._every[0][index]
        flat = self.memory.narrow(0, start, size).view(dtype)
        if not shape:
            return flat
        rows = sum(shapes[index][0][0] for shapes in self._every)
        return flat.view(rows, *shape[1:])

    def pack(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return this rank's part [nbytes]; raises RuntimeError for other shapes than before."""
        if _shapes(inputs) != self._mine:
            raise RuntimeError(
                f"{self._fqn}: fsdp_pre_all_gather returned {_shapes(inputs)} and in an earlier "
                f"forward {self._mine}; dtypes and shapes must stay."
            )
        part = torch.zeros(self.nbytes, dtype=torch.uint8, device=self._device)
        for start, tensor in zip(self._starts, inputs, strict=True):
            size = tensor.numel() * tensor.itemsize
            if size:
                part.narrow(0, start, size).view(tensor.dtype).copy_(tensor.reshape(-1))
        return part

    def unpack(self, full: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copy the gathered bytes [ranks * nbytes] to where the results are; return these."""
        if not self.memory.untyped_storage().nbytes() and self.memory.numel():
            self.memory.untyped_storage().resize_(self.memory.numel())
        parts = full.view(len(self._every), self.nbytes)
        for index, (begin, (at, _)) in enumerate(zip(self._starts, self._regions, strict=True)):
            sizes = [_nbytes(*shapes[index]) for shapes in self._every]
            rank = 0
            while rank < len(sizes):  # equal ones in one copy
                size, first = sizes[rank], rank
                while rank < len(sizes) and sizes[rank] == size:
                    rank += 1
                if size:
                    target = self.memory.narrow(0, at, (rank - first) * size)
                    source = parts[first:rank, begin : begin + size]
                    target.view(rank - first, size).copy_(source)
                at += (rank - first) * size
        return self._results


def _shapes(inputs: tuple[torch.Tensor, ...]) -> Shapes:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
