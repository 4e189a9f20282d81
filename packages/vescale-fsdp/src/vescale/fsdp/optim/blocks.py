# SPDX-License-Identifier: Apache-2.0
"""The matrices that a parameter consists of: itself, experts, heads, the parts of a fused QKV.

Integers only. A matrix is a run of whole rows of the parameter, which counts as
[experts * rows, cols] where it has three dims; so its memory is contiguous too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vescale.dtensor.runs import Runs
from vescale.fsdp.optim.roots import Piece

MatrixSplit = Callable[[str, tuple[int, ...]], Sequence[int] | None]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """One matrix [rows, cols]: rows ``[first, first + rows)`` of expert ``expert``.

    ``start`` is its first element in the parameter's row-major memory.
    """

    expert: int
    first: int
    rows: int
    cols: int
    start: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def numel(self) -> int:
        return self.rows * self.cols


def row_blocks(
    shape: Sequence[int], split: MatrixSplit | None, fqn: str | None
) -> tuple[RowBlock, ...]:
    """Return the matrices of a parameter of ``shape``, [rows, cols] or [experts, rows, cols].

    ``split(fqn, shape)`` returns the row counts of the matrices in [rows, cols], for experts in
    each of them; None leaves it whole. Raises ValueError for counts that do not add up.
    """
    shape = tuple(shape)
    rows, cols = shape[-2:]
    counts = split(fqn, shape) if split is not None else None  # type: ignore[arg-type]  # a split has names
    counts = (rows,) if counts is None else tuple(counts)
    wrong = sum(counts) != rows or any(type(n) is not int or n < 1 for n in counts)
    if wrong and (rows or counts != (0,)):
        raise ValueError(
            f"parameter {fqn!r} has shape {shape}, but matrix_split returned {list(counts)}, "
            f"expected positive row counts that add up to {rows}, or None."
        )
    blocks, start = [], 0
    for expert in range(shape[0] if len(shape) == 3 else 1):
        first = 0
        for count in counts:
            blocks.append(RowBlock(expert, first, count, cols, start))
            first, start = first + count, start + count * cols
    return tuple(blocks)


def block_pieces(blocks: Sequence[RowBlock], runs: Runs) -> list[tuple[Piece, ...]]:
    """Return the pieces of each block of a parameter that ``runs`` cut, in elements per rank."""
    pieces: list[list[Piece]] = [[] for _ in blocks]
    place = 0
    for rank, begin, end in _parts(runs):
        while place < len(blocks) and blocks[place].start + blocks[place].numel <= begin:
            place += 1
        for index in range(place, len(blocks)):
            block = blocks[index]
            low, high = max(begin, block.start), min(end, block.start + block.numel)
            if low >= high:
                break
            pieces[index].append(Piece(rank, low - block.start, high - low))
    return [tuple(mine) for mine in pieces]


def _parts(runs: Runs) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, begin, end) of what each rank holds, without the ranks that hold nothing."""
    rank = begin = 0
    for numel, ranks in runs:
        if numel:
            for index in range(ranks):
                yield rank + index, begin + index * numel, begin + (index + 1) * numel
        rank, begin = rank + ranks, begin + ranks * numel
