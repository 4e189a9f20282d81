# SPDX-License-Identifier: Apache-2.0
"""Fill a rank's part on the CPU with what one device would draw for the whole tensor.

The generator is walked through the whole tensor, in chunks: what this rank holds is drawn in place,
or copied out of a small buffer, and the rest is drawn and dropped, or jumped over. Memory does not
grow with the whole tensor, and the generator ends where one device's does.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vescale.dtensor.random import mt19937
from vescale.dtensor.random.parts import Strip

aten = torch.ops.aten

CHUNK = 1 << 16  # elements drawn at once into the buffer
LONG = 1 << 13  # runs of so many are drawn in place
SPARSE = 1 << 20  # rows of so many are better skipped than drawn
BLOCK = 16  # torch draws normal numbers in blocks
PROBE = 64

Draw = Callable[[torch.Tensor], object]


def fill_part(
    func: Any,
    args: Sequence[object],
    numel: int,
    strips: Sequence[Strip],
    local: torch.Tensor,
    generator: torch.Generator | None,
    contiguous: bool = True,
) -> None:
    """Fill ``local``, flat, with the elements ``strips`` of ``func`` on a tensor of ``numel``.

    ``func`` is an in-place random operator of aten, ``contiguous`` says whether the whole tensor
    would be. Afterwards the generator is where the whole draw leaves it.
    """

    def draw(tensor: torch.Tensor) -> object:
        return func(tensor, *args, generator=generator)

    words = _words_per_element(func, tuple(args), local.dtype)  # raises what the operator raises
    if numel == 0:
        return
    source = torch.default_generator if generator is None else generator
    if words is None:
        step = 1 if contiguous else 2  # torch tells them apart
        whole = torch.empty(step * numel, dtype=local.dtype)[::step]
        draw(whole)
        take_part(whole, strips, local)
        return
    serial = func is aten.normal_.default and (numel < BLOCK or not contiguous)
    blocks = func is aten.normal_.default and not serial
    if serial or func is aten.log_normal_.default:
        words = 0  # a second sample is kept in the generator: draw all
    _Walk(draw, numel, strips, local, source, words, BLOCK if blocks else 1, serial).run()


def take_part(whole: torch.Tensor, strips: Sequence[Strip], local: torch.Tensor) -> None:
    """Copy the elements ``strips`` of ``whole`` into ``local``, both flat."""
    for strip in strips:
        _Taker(strip, local).take(whole, 0, len(whole))


class _Walk:
    """One pass of the generator through the whole tensor."""

    def __init__(
        self,
        draw: Draw,
        numel: int,
        strips: Sequence[Strip],
        local: torch.Tensor,
        generator: torch.Generator,
        words: int,
        grain: int,
        serial: bool,
    ) -> None:
        self.draw, self.numel, self.local, self.generator = draw, numel, local, generator
        self.words, self.grain, self.serial = words, grain, serial
        # With a remainder torch draws the last block again, over what came before: in one call.
        self.head = numel if numel % grain == 0 else (numel // grain - 1) * grain
        self.takers = [_Taker(piece, local) for strip in strips for piece in _pieces(strip)]
        self.position = 0
        self.buffer: torch.Tensor | None = None

    def run(self) -> None:
        todo = 0
        while self.position < self.head:
            while todo < len(self.takers) and self.takers[todo].end <= self.position:
                todo += 1
            if todo == len(self.takers):
                self._skip(self.head)
                break
            taker = self.takers[todo]
            start = min(self.head, self._down(taker.first))
            if start > self.position:
                self._skip(start)
            elif not self._draw_in_place(taker):
                self._draw_chunk(taker)
        if self.position < self.numel:
            self._to_buffer(self.numel)

    def _down(self, position: int) -> int:
        return position // self.grain * self.grain

    def _draw_in_place(self, taker: "_Taker") -> bool:
        if not taker.dense or self.serial or taker.first > self.position:
            return False
        stop = min(self.head, self._down(taker.end))
        if stop - self.position < LONG // 2:
            return False
        self.draw(taker.run(self.position, stop))
        self.position = stop
        return True

    def _draw_chunk(self, taker: "_Taker") -> None:
        stop = min(self.position + CHUNK, self._down(taker.end + self.grain - 1))
        if taker.dense and taker.first > self.position:  # up to where it can go on in place
            stop = self.position + self.grain
        self._to_buffer(min(stop, self.head))

    def _to_buffer(self, stop: int) -> None:
        drawn = self._drawn(stop - self.position)
        for taker in self.takers:
            if taker.first < stop and taker.end > self.position:
                taker.take(drawn, self.position, stop)
        self.position = stop

    def _skip(self, stop: int) -> None:
        words = (stop - self.position) * self.words
        if words and mt19937.pays(words):
            mt19937.seek(self.generator, words)
        else:
            for begin in range(self.position, stop, CHUNK):
                self._drawn(min(CHUNK, stop - begin))
        self.position = stop

    def _drawn(self, count: int) -> torch.Tensor:
        """Return the next ``count`` elements, in the buffer."""
        if self.buffer is None or self.buffer.shape[0] < count:
            longest = max(count, min(CHUNK, self.numel))
            # Numbers two apart: torch then draws one after the other, as for a transposed tensor.
            shape = (longest, 2) if self.serial else (longest,)
            self.buffer = torch.empty(shape, dtype=self.local.dtype)
            self.buffer = self.buffer[:, 0] if self.serial else self.buffer
        part = self.buffer[:count]
        self.draw(part)
        return part


class _Taker:
    """Copies what a strip holds out of drawn chunks."""

    def __init__(self, strip: Strip, local: torch.Tensor) -> None:
        self.strip, self.first, self.end = strip, strip.first, strip.end
        self.part = local[strip.start : strip.start + strip.numel].view(-1, strip.width)
        self.dense = strip.numel == self.end - self.first
        self.first_row, self.last_row = int(strip.rows[0]), int(strip.rows[-1])
        self.every_row = self.last_row - self.first_row + 1 == len(strip.rows)

    def run(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of the whole, a view, where they follow each other."""
        return self.part.view(-1)[start - self.first : stop - self.first]

    def take(self, drawn: torch.Tensor, start: int, stop: int) -> None:
        """Copy from ``drawn``, elements ``[start, stop)`` of the whole tensor."""
        if self.dense:
            first, last = max(start, self.first), min(stop, self.end)
            self.run(first, last).copy_(drawn[first - start : last - start])
            return
        row_numel, place = self.strip.row_numel, 0
        for column, length in self.strip.columns:
            low = max(-(-(start - column) // row_numel), self.first_row)
            high = min((stop - column - length) // row_numel, self.last_row)
            if low <= high:  # rows that are there as a whole
                self._take_rows(drawn, start, column, length, place, low, high)
            for row in {low - 1, max(high, low - 1) + 1}:
                first = max(start, row * row_numel + column)
                last = min(stop, row * row_numel + column + length)
                index = self._index(row)
                if first < last and index is not None:
                    offset = place + first - row * row_numel - column
                    target = self.part[index, offset : offset + last - first]
                    target.copy_(drawn[first - start : last - start])
            place += length

    def _take_rows(
        self,
        drawn: torch.Tensor,
        start: int,
        column: int,
        length: int,
        place: int,
        low: int,
        high: int,
    ) -> None:
        row_numel, step = self.strip.row_numel, drawn.stride(0)
        rows = drawn.as_strided(
            (high - low + 1, length),
            (row_numel * step, step),
            drawn.storage_offset() + (low * row_numel + column - start) * step,
        )
        if self.every_row:
            first = low - self.first_row
            self.part[first : first + len(rows), place : place + length].copy_(rows)
            return
        first, last = self.strip.rows.searchsorted([low, high + 1]).tolist()
        index = torch.from_numpy(self.strip.rows[first:last] - low).to(drawn.device)
        self.part[first:last, place : place + length].copy_(rows[index])

    def _index(self, row: int) -> int | None:
        if not self.first_row <= row <= self.last_row:
            return None
        if self.every_row:
            return row - self.first_row
        found = int(self.strip.rows.searchsorted(row))
        return found if self.strip.rows[found] == row else None


def _pieces(strip: Strip) -> list[Strip]:
    """Return the runs of ``strip`` one by one where they are long or far apart, else it whole."""
    shortest = min(length for _, length in strip.columns)
    if strip.numel == strip.end - strip.first or (shortest < LONG and strip.row_numel < SPARSE):
        return [strip]
    pieces, start = [], strip.start
    for begin, length in strip.segments():
        pieces.append(Strip(strip.rows[:1] * 0, length, ((begin, length),), start))
        start += length
    return pieces


@functools.lru_cache(maxsize=1024)
def _words_per_element(func: Any, args: tuple, dtype: torch.dtype) -> int | None:
    """Return the words that ``func`` takes for an element, or None if a part cannot be drawn.

    It is measured, as torch may draw through a library that jumps ahead by itself.
    """
    generator = torch.Generator().manual_seed(0)
    func(torch.empty(PROBE, dtype=dtype), *args, generator=generator)
    words, rest = divmod(mt19937.drawn_since_seeded(generator), PROBE)
    return None if dtype.is_complex or rest or not words else words
