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
_FAIR = 1.1  # an imbalance that needs no words


@dataclass(frozen=True, slots=True)
class Piece:
    """The run ``[start, start + numel)`` of a matrix's row-major memory that ``rank`` holds."""

    rank: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix [rows, cols], cut into contiguous pieces, at most one for each rank.

    ``flops`` is what its root computes; None means ``ns_steps`` of Newton-Schulz.
    """

    rows: int
    cols: int
    pieces: tuple[Piece, ...]
    ns_steps: int = 5
    flops: int | None = None

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
        """FLOPs; of Newton-Schulz two [m, n] and one [m, m] product in each step, m <= n."""
        if self.flops is not None:
            return self.flops
        m, n = sorted((self.rows, self.cols))
        # max(..., 1): without steps the matrix still has to be copied.
        return 2 * max(self.ns_steps, 1) * (2 * n * m * m + m**3)


@dataclass(frozen=True)
class RootPlan:
    """Which rank is the root of each matrix, and what that choice costs.

    ``replicas`` groups of ``world_size`` ranks hold the same pieces. A root counts all of them:
    ``roots[i]`` is ``replica * world_size + rank``. Lists of costs have one entry for each.
    """

    matrices: tuple[Matrix, ...]
    roots: tuple[int, ...]
    world_size: int
    replicas: int = 1

    def home(self, index: int) -> tuple[int, int]:
        """Return (replica, rank) of the root of matrix ``index``."""
        return divmod(self.roots[index], self.world_size)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """FLOPs of Newton-Schulz on each rank."""
        loads = [0] * (self.replicas * self.world_size)
        for matrix, root in zip(self.matrices, self.roots, strict=True):
            loads[root] += matrix.cost
        return tuple(loads)

    @property
    def imbalance(self) -> float:
        """Largest load over mean load: 1.0 is perfect."""
        return max(self.loads) * len(self.loads) / max(sum(self.loads), 1)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Elements that each rank receives as a root, one way."""
        received = [0] * (self.replicas * self.world_size)
        for index, root in enumerate(self.roots):
            received[root] += self.moved(index)
        return tuple(received)

    def moved(self, index: int) -> int:
        """Return how many elements of matrix ``index`` travel to its root."""
        _, rank = self.home(index)
        return _away(self.matrices[index], rank)

    @property
    def moved_numel(self) -> int:
        """Elements that travel to a root, all ranks summed; as many travel back."""
        return sum(self.received)

    @property
    def shared_numel(self) -> int:
        """Elements of results that travel to other replicas, all ranks summed."""
        return (self.replicas - 1) * sum(matrix.numel for matrix in self.matrices)

    def sent_nbytes(self, itemsize: int) -> int:
        """Return the bytes of one exchange, all ranks summed: there, back, and to replicas."""
        return itemsize * (2 * self.moved_numel + self.shared_numel)

    @property
    def is_local(self) -> bool:
        """True when every root already holds its whole matrix: nothing has to be gathered."""
        return all(matrix.holder is not None for matrix in self.matrices)

    @property
    def advice(self) -> str | None:
        """What to know where the busiest rank has over a tenth more than the mean; else None."""
        if self.imbalance <= _FAIR:
            return None
        ranks = len(self.loads)
        text = (
            f"the busiest of {ranks} ranks computes {self.imbalance:.2f} times the mean of its "
            f"{len(self.matrices)} matrices, and the others wait for it: "
        )
        largest = max(matrix.cost for matrix in self.matrices) * ranks / sum(self.loads)
        if largest > _FAIR:
            return text + (
                f"the largest matrix alone is {largest:.2f} times the mean, so more ranks, or "
                "replicas, shorten this no further."
            )
        if any(matrix.holder is not None for matrix in self.matrices):
            return text + (
                "matrices that one rank holds stay there; with a granularity that cuts them they "
                "could go to any rank."
            )
        return text + "they cannot be divided evenly among so many."

    def describe(self) -> str:
        """Return one line for each matrix; equal plans, and only these, have equal texts."""
        ranks = f"{self.replicas} times {self.world_size} ranks"
        lines = [f"{len(self.matrices)} matrices on {ranks}"]
        for index, (matrix, root) in enumerate(zip(self.matrices, self.roots, strict=True)):
            pieces = ", ".join(f"({p.rank}, {p.start}, {p.numel})" for p in matrix.pieces)
            lines.append(
                f"matrix {index} [{matrix.rows}, {matrix.cols}], {matrix.ns_steps} steps, "
                f"root {root}, pieces (rank, start, numel) {pieces}"
            )
        return "\n".join(lines)


def plan_roots(matrices: Sequence[Matrix], world_size: int, replicas: int = 1) -> RootPlan:
    """Return roots that balance the FLOPs of all ``matrices``, and move little where that is free.

    A whole matrix stays where it is, on one of the replicas. The others are placed from the
    costliest to the cheapest (LPT list scheduling), each on the least loaded rank, or, among its
    holders that tie with that rank within 1% of the mean load, on the one that holds most of it.
    Remaining ties: elements received so far, then the lower rank; the order of ``matrices`` decides
    between equal costs.

    The largest load is at most the mean plus the largest cost, unless whole matrices exceed it.
    """
    ranks = world_size * replicas
    loads, received = [0] * ranks, [0] * ranks
    roots = [-1] * len(matrices)
    mean = sum(matrix.cost for matrix in matrices) // ranks
    heap = [(0, 0, rank) for rank in range(ranks)]

    def assign(index: int, root: int) -> None:
        matrix = matrices[index]
        roots[index] = root
        loads[root] += matrix.cost
        received[root] += _away(matrix, root % world_size)
        heapq.heappush(heap, (loads[root], received[root], root))

    order = sorted(range(len(matrices)), key=lambda index: (-matrices[index].cost, index))
    for index in order:
        holder = matrices[index].holder
        if holder is not None:
            assign(index, min(range(holder, ranks, world_size), key=lambda r: (loads[r], r)))

    for index in order:
        if matrices[index].holder is not None:
            continue
        while heap[0][:2] != (loads[heap[0][2]], received[heap[0][2]]):
            heapq.heappop(heap)  # an entry from before its rank got more work
        least_load, _, least = heap[0]
        limit = min(least_load + mean * _TIE_PERCENT // 100, mean)
        ties = [
            (piece.numel, -received[root], -root)
            for piece in matrices[index].pieces
            for root in range(piece.rank, ranks, world_size)
            if loads[root] <= limit
        ]
        best = max(ties, default=None)
        assign(index, least if best is None else -best[2])
    return RootPlan(tuple(matrices), tuple(roots), world_size, replicas)


def _away(matrix: Matrix, rank: int) -> int:
    return sum(piece.numel for piece in matrix.pieces if piece.rank != rank)
