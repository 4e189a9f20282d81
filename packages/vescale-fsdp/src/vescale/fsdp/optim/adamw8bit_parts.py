# SPDX-License-Identifier: Apache-2.0
"""Cut what a rank holds into batches of bounded size, each updated by a few large operations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vescale.dtensor.runs import locate
from vescale.fsdp.optim.adamw8bit_state import CODES, FLOAT_STATE, SCALES, SIGNED
from vescale.fsdp.optim.cuts import local_of, read_cut
from vescale.fsdp.optim.quantize import decode, encode
from vescale.fsdp.optim.rounding import round_to_bfloat16
from vescale.fsdp.tiles import Tiling

# Bounds the float32 memory of a step.
BATCH_NUMEL = 1 << 22

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """A run of one parameter's local memory, of whole blocks; tensors are flat views [n].

    ``moments`` are codes with ``tiling`` and float32 values without it. ``start`` is the run's
    place in the whole tensor, in elements; with ``key`` the parameter is rounded stochastically.
    """

    param: torch.Tensor
    grad: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]
    tiling: Tiling | None
    key: Key | None
    start: int

    def read(self) -> tuple[torch.Tensor, ...]:
        """Return parameter, gradient and both moments in float32; those that are so, as views."""
        moments = self.moments
        if self.tiling is not None:
            moments = tuple(
                decode(codes, scales, self.tiling, signed=signed)
                for codes, scales, signed in zip(moments, self.scales, SIGNED, strict=True)
            )
        return self.param.float(), self.grad.float(), *moments

    def write(self, param: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """Store what ``read`` returned and the update has changed."""
        if self.key is not None:
            param = round_to_bfloat16(param, self.key, self.start)
        if param is not self.param:
            self.param.copy_(param)
        if self.tiling is None:
            return
        for codes, scales, values, signed in zip(
            self.moments, self.scales, moments, SIGNED, strict=True
        ):
            new_codes, new_scales = encode(values, self.tiling, signed=signed)
            codes.copy_(new_codes)
            scales.copy_(new_scales)


def parts_of(
    param: torch.Tensor,
    flat: torch.Tensor,
    state: dict,
    tiling: Tiling | None,
    key: Key | None,
    label: str,
) -> Iterator[Part]:
    """Yield the local part of ``param`` in runs of about ``BATCH_NUMEL``; ``flat`` are its values.

    ``flat`` is a view of it, or a copy where it is not contiguous.
    """
    grad = local_of(param.grad).reshape(-1)  # type: ignore[arg-type]  # it has one
    start = 0
    if key is not None and (cut := read_cut(param, label)) is not None:
        start, _ = locate(cut.runs, cut.group.rank())
    names, band = FLOAT_STATE, 1
    scales: tuple[torch.Tensor, ...] = ()
    if tiling is not None:
        names, band = CODES, tiling.band_numel
        scales = tuple(local_of(state[name]).view(-1, tiling.grid[1]) for name in SCALES)
    moments = tuple(local_of(state[name]).view(-1) for name in names)
    run = max(BATCH_NUMEL // band, 1) * band
    for begin in range(0, flat.numel(), run):
        numel = min(run, flat.numel() - begin)
        bands = (begin // band, tiling.bands(numel)) if tiling is not None else (0, 0)
        yield Part(
            flat.narrow(0, begin, numel),
            grad.narrow(0, begin, numel),
            tuple(moment.narrow(0, begin, numel) for moment in moments),
            tuple(scale.narrow(0, *bands) for scale in scales),
            tiling,
            key,
            start + begin,
        )


def batched(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield ``parts`` in lists of at most ``BATCH_NUMEL`` elements, or of one part."""
    batch: list[Part] = []
    numel = 0
    for part in parts:
        if batch and numel + part.param.numel() > BATCH_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(part)
        numel += part.param.numel()
    if batch:
        yield batch
