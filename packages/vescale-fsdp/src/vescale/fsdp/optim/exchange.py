# SPDX-License-Identifier: Apache-2.0
"""Bring each cut matrix to its root, and the result back: one packed all-to-all each way.

Knows flat tensors, a process group and a ``RootPlan``, no parameter. What is sent, and how much,
follows from the plan alone and never from the data, so ranks cannot disagree and hang.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vescale.fsdp.optim.roots import RootPlan


@dataclass(frozen=True, slots=True)
class Slot:
    """One piece in a packed buffer: elements ``[at, at + numel)``, and its flag at ``flag``.

    ``start`` is the piece's first element in the row-major memory of matrix number ``matrix``.
    """

    matrix: int
    start: int
    numel: int
    at: int
    flag: int


@dataclass(frozen=True, slots=True)
class Side:
    """One packed buffer of a rank: ``splits[r]`` elements to or from rank r, flags included.

    For each peer, the pieces in matrix order and then their flags, so that pieces stay dense.
    """

    slots: tuple[Slot, ...]
    splits: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.splits)


def away_side(plan: RootPlan, rank: int) -> Side:
    """Return the layout of what ``rank`` holds of matrices with another root."""
    pieces = [[] for _ in range(plan.world_size)]
    for index, (matrix, root) in enumerate(zip(plan.matrices, plan.roots, strict=True)):
        if root != rank:
            pieces[root] += [(index, piece) for piece in matrix.pieces if piece.rank == rank]
    return _pack(pieces)


def home_side(plan: RootPlan, rank: int) -> Side:
    """Return the layout of what other ranks hold of the matrices whose root is ``rank``."""
    pieces = [[] for _ in range(plan.world_size)]
    for index, (matrix, root) in enumerate(zip(plan.matrices, plan.roots, strict=True)):
        if root == rank:
            for piece in matrix.pieces:
                if piece.rank != rank:
                    pieces[piece.rank].append((index, piece))
    return _pack(pieces)


def _pack(pieces_by_peer: Sequence[Sequence[tuple]]) -> Side:
    slots, splits, at = [], [], 0
    for pieces in pieces_by_peer:
        begin, flag = at, at + sum(piece.numel for _, piece in pieces)
        for index, piece in pieces:
            slots.append(Slot(index, piece.start, piece.numel, at, flag))
            at, flag = at + piece.numel, flag + 1
        at = flag
        splits.append(at - begin)
    return Side(tuple(slots), tuple(splits))


class OwnerGather:
    """Apply a function of whole matrices to matrices that are cut between the ranks of a group.

    Args:
        plan: the matrices, their pieces and their roots; the same on every rank.
        group: the process group; piece ranks are ranks of this group.
        dtype: element type on the wire. Flags travel as its 0 and 1.
        device: where the packed buffers live, and where matrices are solved.
    """

    def __init__(
        self,
        plan: RootPlan,
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plan, self.group, self.dtype, self.device = plan, group, dtype, device
        self.rank = group.rank()
        self.away, self.home = away_side(plan, self.rank), home_side(plan, self.rank)
        self._away_flags = _flag_index(self.away, device)
        self._home_flags = _flag_index(self.home, device)
        self._own = {
            index: piece
            for index, matrix in enumerate(plan.matrices)
            for piece in matrix.pieces
            if piece.rank == self.rank
        }
        self._home_slots: dict[int, list[Slot]] = {
            index: [] for index, root in enumerate(plan.roots) if root == self.rank
        }
        for slot in self.home.slots:
            self._home_slots[slot.matrix].append(slot)

    def run(
        self,
        pack: Callable[[int, torch.Tensor], bool],
        solve: Callable[[int, torch.Tensor], torch.Tensor],
        unpack: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Solve every matrix that some rank wants solved; two collectives, or none if all is local.

        Args:
            pack: ``pack(index, out)`` writes this rank's piece of a matrix into ``out`` [numel] and
                returns whether this rank wants the matrix solved. It writes in either case: another
                rank may want it.
            solve: ``solve(index, flat)`` returns the result, [rows, cols] or flat, of the assembled
                matrix ``flat`` [rows * cols]. Called on the root only, and only where at least one
                rank wants it.
            unpack: ``unpack(index, piece)`` receives this rank's piece [numel] of the result, a
                view that is valid during the call. Called under the same condition.
        """
        away, home = self._buffer(self.away), self._buffer(self.home)
        wanted = [pack(slot.matrix, _piece(away, slot)) for slot in self.away.slots]
        _write_flags(away, self._away_flags, wanted)
        self._all_to_all(home, self.home, away, self.away)

        flags = _read_flags(home, self._home_flags)
        wanted_by = dict(zip(self.home.slots, flags, strict=True))
        answers = dict.fromkeys(self.home.slots, False)
        for index, slots in self._home_slots.items():
            full = torch.empty(
                self.plan.matrices[index].numel, dtype=self.dtype, device=self.device
            )
            own = self._own.get(index)
            wants = own is not None and pack(index, full.narrow(0, own.start, own.numel))
            if not (wants or any(wanted_by[slot] for slot in slots)):
                continue
            for slot in slots:
                full.narrow(0, slot.start, slot.numel).copy_(_piece(home, slot))
            result = solve(index, full).reshape(-1).to(self.dtype)
            for slot in slots:
                _piece(home, slot).copy_(result.narrow(0, slot.start, slot.numel))
                answers[slot] = True
            if own is not None:
                unpack(index, result.narrow(0, own.start, own.numel))

        _write_flags(home, self._home_flags, list(answers.values()))
        self._all_to_all(away, self.away, home, self.home)
        if not all(wanted):  # else the answers are known, and need not be read from the device
            wanted = _read_flags(away, self._away_flags)
        for slot, was_solved in zip(self.away.slots, wanted, strict=True):
            if was_solved:
                unpack(slot.matrix, _piece(away, slot))

    def _buffer(self, side: Side) -> torch.Tensor:
        return torch.empty(side.numel, dtype=self.dtype, device=self.device)

    def _all_to_all(
        self, output: torch.Tensor, to: Side, source: torch.Tensor, origin: Side
    ) -> None:
        if not self.plan.is_local:
            dist.all_to_all_single(
                output, source, list(to.splits), list(origin.splits), group=self.group
            )


def _piece(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    return buffer.narrow(0, slot.at, slot.numel)


def _flag_index(side: Side, device: torch.device) -> torch.Tensor:
    return torch.tensor([slot.flag for slot in side.slots], dtype=torch.int64, device=device)


def _write_flags(buffer: torch.Tensor, index: torch.Tensor, flags: Sequence[bool]) -> None:
    buffer[index] = torch.tensor(flags, dtype=buffer.dtype, device=buffer.device)


def _read_flags(buffer: torch.Tensor, index: torch.Tensor) -> list[bool]:
    return [flag != 0 for flag in buffer[index].tolist()]
