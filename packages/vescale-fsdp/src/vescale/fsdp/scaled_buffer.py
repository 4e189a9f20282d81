# SPDX-License-Identifier: Apache-2.0
"""A buffer whose gather sends codes of one byte, and scales that each rank finds by itself.

Two flat tensors travel in one launch: the codes, laid out as the plan lays out elements, and a
*side* of M numbers a rank, which has the scales of its tiles, and its part of tensors that travel
as they are. No rank boundary may cut a tile.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from vescale.fsdp._torch_compat import set_version
from vescale.fsdp.block_scaled import BlockScaled, decode, encode
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.lanes import AnyPlan


class ScaledBuffer(DBuffer):
    """A DBuffer that gathers its shard as ``form`` says.

    ``shapes`` are those of the tensors of the plan. The full buffer has the values that the codes
    and scales stand for, in ``full_dtype``. What ``keep`` left is gathered as it is.
    """

    def __init__(
        self, plan: AnyPlan, *args: Any, form: BlockScaled, shapes: Sequence, **options: Any
    ) -> None:
        super().__init__(plan, *args, **options)
        self._form = form
        self._tilings = [form.tiling(shape, self.dtype) for shape in shapes]
        self._side_dtype = torch.promote_types(torch.float32, self.full_dtype)
        self._sides = [self._side_sizes(index) for index in range(len(plan.requests))]
        per_rank = [sum(sizes) for sizes in zip(*self._sides, strict=True)] or [0]
        align = 16 // self._side_dtype.itemsize
        self._side_numel = -(-max(per_rank) // align) * align
        self._index: torch.Tensor | None = None  # from the gathered side to that of each tensor
        self._arriving: tuple[torch.Tensor, torch.Tensor] | None = None

    def _side_sizes(self, index: int) -> list[int]:
        """Return how many numbers of tensor ``index`` are in the side of each rank."""
        tiling, sizes = self._tilings[index], []
        for numel, ranks in self.plan.shard_runs(index):
            number = numel if tiling is None else tiling.bands(numel) * tiling.grid[1]
            sizes += [number] * ranks
        return sizes

    # --- gather -----------------------------------------------------------------------------

    def all_gather(self, *, modified: bool = False) -> None:
        """Launch the gather of codes and scales; see DBuffer for the rest."""
        if self._kept is not None:
            super().all_gather(modified=modified)
            return
        full = self.allocate_full()
        version, work = None if modified else full._version, None
        if full.numel():
            with torch.inference_mode(False), torch.no_grad():
                own = torch.zeros(self.slices.shard_numel, dtype=torch.uint8, device=self.device)
                side = self._encode(own).view(torch.uint8)
                codes, sides = own, side
                if self.plan.world_size > 1:
                    codes = own.new_empty(self.slices.full_numel)
                    sides = side.new_empty(self.plan.world_size * side.numel())
                    outputs = [*self._lanes_of(codes, 2), sides]
                    work = self.collectives.gather_lanes(outputs, [*self._lanes_of(own, 0), side])
                self._arriving = codes, sides
        self._gathering = work, version

    def _encode(self, codes: torch.Tensor) -> torch.Tensor:
        """Write the codes of this rank's shard, and return its side."""
        side = torch.zeros(self._side_numel, dtype=self._side_dtype, device=self.device)
        values, at = self.shard_views(self.shard), 0
        for value, code, tiling in zip(values, self.shard_views(codes), self._tilings, strict=True):
            if tiling is None:
                side[at : at + value.numel()].copy_(value.to(self.full_dtype))
                at += value.numel()
            elif value.numel():
                matrix = value.view(-1, tiling.cols)
                grid = tiling.bands(value.numel()), tiling.grid[1]
                scales = side[at : at + grid[0] * grid[1]].view(grid)
                encode(
                    matrix, code.view(self._form.dtype).view(matrix.shape), scales, tiling.tile[0]
                )
                at += scales.numel()
        return side

    def wait_gather(self) -> None:
        """Wait for the gather under way, if any, and write the values into the full buffer."""
        if self._arriving is None:
            super().wait_gather()
            return
        (codes, sides), self._arriving = self._arriving, None
        (work, version), self._gathering = self._gathering, None
        if work is not None:
            work.wait()
        with torch.inference_mode(False), torch.no_grad():
            self._decode(codes, sides.view(self._side_dtype))
        if version is None:
            increment_version(self._full)
        else:
            set_version(self._full, version)

    def _decode(self, codes: torch.Tensor, sides: torch.Tensor) -> None:
        if self._index is None:
            self._index = self._make_index()
        parts = sides[self._index].split([sum(sizes) for sizes in self._sides])
        for index, (tiling, side) in enumerate(zip(self._tilings, parts, strict=True)):
            out = self.view(index)
            if tiling is None:
                out.copy_(side)
                continue
            begin, shape = self.plan.offsets[index], (-1, tiling.cols)
            code = codes[begin : begin + out.numel()].view(self._form.dtype).view(shape)
            decode(code, side.view(tiling.grid), out.view(shape), tiling.tile[0])

    def _make_index(self) -> torch.Tensor:
        """Return where in the gathered sides each tensor's numbers are, one after the other."""
        starts, pieces = [0] * self.plan.world_size, []
        for sizes in self._sides:
            for rank, number in enumerate(sizes):
                if number:
                    begin = rank * self._side_numel + starts[rank]
                    pieces.append(torch.arange(begin, begin + number))
                    starts[rank] += number
        return torch.cat(pieces).to(self.device) if pieces else torch.empty(0, dtype=torch.int64)
