# SPDX-License-Identifier: Apache-2.0
"""Choose the one rank, the root, that orthogonalizes each matrix of a process group.

Pure Python over integers: every size and offset is in elements. The choice depends on global
shapes and on where the cuts are, on nothing else, so all ranks make it alike without talking, and
a checkpoint need not save it.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# A rank ties with the least loaded one when their loads differ by at most this share of the mean.
_TIE_PERCENT = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """The run ``[start, start + numel)`` of a matrix's row-major memory that ``rank`` holds."""

    rank: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix [rows, cols], cut into contiguous pieces, at most one for each rank."""

    rows: int
    cols: int
    pieces: tuple[Piece, ...]
    ns_steps: int = 5

    def __post_init__(self) -> None:
        end = 0
        for piece in self.pieces:
            if piece.start != end or piece.numel < 1:
                raise ValueError(f"{piece} does not follow element {end}; list pieces in order.")
            end += piece.numel
        if end != self.rows * self.cols:
            raise ValueError(f"pieces hold {end} elements of a [{self.rows}, {self.cols}] matrix.")
        if len({piece.rank for piece in self.pieces}) != len(self.pieces):
            raise ValueError("a rank holds two pieces; join them, or cut the matrix otherwise.")

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def holder(self) -> int | None:
        """The rank that holds all of it, or None when it is cut."""
        return self.pieces[0].rank if len(self.pieces) == 1 else None

    @property
    def cost(self) -> int:
        """FLOPs of Newton-Schulz: two [m, n] and one [m, m] product in each step, m <= n."""
        m, n = sorted((self.rows, self.cols))
        # max(..., 1): without steps the matrix still has to be copied.
        return 2 * max(self.ns_steps, 1) * (2 * n * m * m + m**3)


@dataclass(frozen=True)
class RootPlan:
    """Which rank is the root of each matrix, and what that choice costs."""

    matrices: tuple[Matrix, ...]
    roots: tuple[int, ...]
    world_size: int

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """FLOPs of Newton-Schulz on each rank."""
        loads = [0] * self.world_size
        for matrix, root in zip(self.matrices, self.roots, strict=True):
            loads[root] += matrix.cost
        return tuple(loads)

    @property
    def imbalance(self) -> float:
        """Largest load over mean load: 1.0 is perfect."""
        return max(self.loads) * self.world_size / max(sum(self.loads), 1)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Elements that each rank receives as a root, one way."""
        received = [0] * self.world_size
        for matrix, root in zip(self.matrices, self.roots, strict=True):
            received[root] += sum(piece.numel for piece in matrix.pieces if piece.rank != root)
        return tuple(received)

    @property
    def moved_numel(self) -> int:
        """Elements that travel to a root, all ranks summed; as many travel back."""
        return sum(self.received)

    @property
    def moved_pieces(self) -> int:
        """Pieces that travel to a root; each brings one flag."""
        return sum(
            piece.rank != root
            for matrix, root in zip(self.matrices, self.roots, strict=True)
            for piece in matrix.pieces
        )

    def sent_nbytes(self, itemsize: int) -> int:
        """Return the bytes of one exchange, all ranks summed: pieces and flags, both ways."""
        return 2 * itemsize * (self.moved_numel + self.moved_pieces)

    @property
    def is_local(self) -> bool:
        """True when every root already holds its whole matrix: nothing has to travel."""
        return all(matrix.holder is not None for matrix in self.matrices)

    def describe(self) -> str:
        """Return one line for each matrix; equal plans, and only these, have equal texts."""
        lines = [f"{len(self.matrices)} matrices on {self.world_size} ranks"]
        for index, (matrix, root) in enumerate(zip(self.matrices, self.roots, strict=True)):
            pieces = ", ".join(f"({p.rank}, {p.start}, {p.numel})" for p in matrix.pieces)
            lines.append(
                f"matrix {index} [{matrix.rows}, {matrix.cols}], {matrix.ns_steps} steps, "
                f"root {root}, pieces (rank, start, numel) {pieces}"
            )
        return "\n".join(lines)


def plan_roots(matrices: Sequence[Matrix], world_size: int) -> RootPlan:
    """Return roots that balance the FLOPs of all ``matrices``, and move little where that is free.

    A whole matrix stays where it is. The others are placed from the costliest to the cheapest
    (LPT list scheduling), each on the least loaded rank, or, among its holders that tie with that
    rank within 1% of the mean load, on the one that holds most of it. Remaining ties: elements
    received so far, then the lower rank; the order of ``matrices`` decides between equal costs.

    The largest load is at most the mean plus the largest cost, unless whole matrices exceed it.
    """
    loads, received = [0] * world_size, [0] * world_size
    roots = [-1] * len(matrices)
    mean = sum(matrix.cost for matrix in matrices) // world_size
    heap = [(0, 0, rank) for rank in range(world_size)]

    def assign(index: int, root: int) -> None:
        matrix = matrices[index]
        roots[index] = root
        loads[root] += matrix.cost
        received[root] += sum(piece.numel for piece in matrix.pieces if piece.rank != root)
        heapq.heappush(heap, (loads[root], received[root], root))

    for index, matrix in enumerate(matrices):
        if matrix.holder is not None:
            assign(index, matrix.holder)

    cut = [index for index, matrix in enumerate(matrices) if matrix.holder is None]
    for index in sorted(cut, key=lambda index: (-matrices[index].cost, index)):
        while heap[0][:2] != (loads[heap[0][2]], received[heap[0][2]]):
            heapq.heappop(heap)  # an entry from before its rank got more work
        least_load, _, least = heap[0]
        limit = min(least_load + mean * _TIE_PERCENT // 100, mean)
        ties = [piece for piece in matrices[index].pieces if loads[piece.rank] <= limit]
        best = max(ties, key=lambda p: (p.numel, -received[p.rank], -p.rank), default=None)
        assign(index, least if best is None else best.rank)
    return RootPlan(tuple(matrices), tuple(roots), world_size)
