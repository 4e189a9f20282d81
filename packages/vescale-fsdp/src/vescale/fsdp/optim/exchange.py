# SPDX-License-Identifier: Apache-2.0
"""Bring each cut matrix to its root, and the result back, while other matrices are computed.

Knows flat tensors, process groups and a ``RootPlan``, no parameter. What is sent, and how much,
follows from the plan alone and never from the data, so ranks cannot disagree and hang.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vescale.fsdp.optim.roots import RootPlan
from vescale.fsdp.optim.rounds import Round, fill_rounds, plan_rounds
from vescale.fsdp.phases import waiting

Pack = Callable[[int, torch.Tensor | None], None]
Solve = Callable[[Sequence[int], Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Unpack = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Slot:
    """One piece in a packed buffer: elements ``[at, at + numel)``.

    ``start`` is the piece's first element in the row-major memory of matrix number ``matrix``.
    """

    matrix: int
    start: int
    numel: int
    at: int


@dataclass(frozen=True, slots=True)
class Side:
    """One packed buffer of a rank: ``splits[r]`` elements to or from rank r, in matrix order."""

    slots: tuple[Slot, ...]
    splits: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.splits)


def away_side(plan: RootPlan, indices: Sequence[int], rank: int) -> Side:
    """Return the layout of what ``rank`` holds of the matrices with another root."""
    pieces: list[list] = [[] for _ in range(plan.world_size)]
    for index in indices:
        _, root = plan.home(index)
        if root != rank:
            mine = [p for p in plan.matrices[index].pieces if p.rank == rank]
            pieces[root] += [(index, piece) for piece in mine]
    return _pack(pieces)


def home_side(plan: RootPlan, indices: Sequence[int], rank: int) -> Side:
    """Return the layout of what other ranks hold of the matrices whose root is ``rank``."""
    pieces: list[list] = [[] for _ in range(plan.world_size)]
    for index in indices:
        _, root = plan.home(index)
        if root == rank:
            for piece in plan.matrices[index].pieces:
                if piece.rank != rank:
                    pieces[piece.rank].append((index, piece))
    return _pack(pieces)


def share_sides(plan: RootPlan, indices: Sequence[int], rank: int) -> tuple[Side, ...]:
    """Return, for each replica, the layout of what ``rank`` holds of the matrices solved there."""
    pieces: list[list] = [[] for _ in range(plan.replicas)]
    for index in indices:
        replica, _ = plan.home(index)
        mine = [p for p in plan.matrices[index].pieces if p.rank == rank]
        pieces[replica] += [(index, piece) for piece in mine]
    return tuple(_pack([mine]) for mine in pieces)


def _pack(pieces_by_peer: Sequence[Sequence[tuple]]) -> Side:
    slots, splits, at = [], [], 0
    for pieces in pieces_by_peer:
        begin = at
        for index, piece in pieces:
            slots.append(Slot(index, piece.start, piece.numel, at))
            at += piece.numel
        splits.append(at - begin)
    return Side(tuple(slots), tuple(splits))


class OwnerGather:
    """Apply a function of whole matrices to matrices that are cut between the ranks of a group.

    Args:
        plan: the matrices, their pieces and their roots; the same on every rank.
        group: the process group; piece ranks are ranks of this group.
        replica_group: the ranks that hold the same pieces, one for each replica of the plan.
        dtype: element type on the wire.
        device: where the packed buffers live, and where matrices are solved.
        max_nbytes: of the buffers of one round, unless one matrix takes more. Three rounds are
            under way at a time: one sent, one computed, one on its way back.
        batched: hand ``solve`` all matrices of a round at once, not one by one.
    """

    def __init__(
        self,
        plan: RootPlan,
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
        replica_group: dist.ProcessGroup | None = None,
        max_nbytes: int = 1 << 30,
        batched: bool = False,
    ) -> None:
        self.plan, self.group, self.dtype, self.device = plan, group, dtype, device
        self.replica_group, self.batched, self.max_nbytes = replica_group, batched, max_nbytes
        self.rank = group.rank()
        self.replica = replica_group.rank() if replica_group is not None else 0
        self.own = {
            index: piece
            for index, matrix in enumerate(plan.matrices)
            for piece in matrix.pieces
            if piece.rank == self.rank
        }
        self.rounds = plan_rounds(plan, dtype.itemsize, max_nbytes)
        self._passes = [_Pass(self, indices) for indices in self.rounds]
        # What needs no exchange, for each round; without rounds there is one list all the same.
        self._kept = [fill.get(self.bin, []) for fill in fill_rounds(plan, self.rounds)]

    @property
    def bin(self) -> int:
        """What the plan calls this rank as a root."""
        return self.replica * self.plan.world_size + self.rank

    def run(self, wanted: Sequence[bool], pack: Pack, solve: Solve, unpack: Unpack) -> None:
        """Solve the matrices that are ``wanted``; two collectives for each round.

        The result of a round travels back, and the next round's matrices come, during ``solve``.

        Args:
            wanted: one flag for each matrix; those of a matrix are alike on all its holders.
            pack: ``pack(index, out)`` writes this rank's piece of a matrix into ``out`` [numel];
                None tells that the matrix is solved in another replica, from its own pieces.
            solve: ``solve(indices, flats)`` returns the results, [rows, cols] or flat, of the
                assembled matrices ``flats``, each [rows * cols].
            unpack: ``unpack(index, piece)`` receives this rank's piece [numel] of the result, a
                view that is valid during the call.

        The callbacks are called for wanted matrices only.
        """
        calls = _Calls(wanted, pack, solve, unpack)
        passes = self._passes
        if not passes:
            self._solve_kept(self._kept[0], calls)
            return
        passes[0].send(calls)
        for place, current in enumerate(passes):
            if place + 1 < len(passes):
                passes[place + 1].send(calls)
            self._solve_kept(self._kept[place], calls)
            current.solve(calls)
            if place:
                passes[place - 1].finish(calls)
        passes[-1].finish(calls)

    def assemble(self, index: int, calls: "_Calls") -> torch.Tensor:
        """Return memory for a whole matrix, with this rank's piece in it."""
        full = torch.empty(self.plan.matrices[index].numel, dtype=self.dtype, device=self.device)
        own = self.own.get(index)
        if own is not None:
            calls.pack(index, full.narrow(0, own.start, own.numel))
        return full

    def solve(self, indices: list[int], fulls: list[torch.Tensor], calls: "_Calls") -> list:
        """Return the results, flat and in the dtype of the wire."""
        results = calls.solve(indices, fulls)
        return [result.reshape(-1).to(self.dtype) for result in results]

    def chunks(self, indices: list[int]) -> list[list[int]]:
        """Return what is solved at once, of bounded size."""
        chunks: list[list[int]] = []
        numel = 0
        for index in indices:
            numel += self.plan.matrices[index].numel
            if not self.batched or not chunks or numel * self.dtype.itemsize > self.max_nbytes:
                chunks.append([])
                numel = self.plan.matrices[index].numel
            chunks[-1].append(index)
        return chunks

    def _solve_kept(self, indices: Sequence[int], calls: "_Calls") -> None:
        for chunk in self.chunks([index for index in indices if calls.wanted[index]]):
            fulls = [self.assemble(index, calls) for index in chunk]
            for index, result in zip(chunk, self.solve(chunk, fulls, calls), strict=True):
                calls.unpack(index, result)


@dataclass(frozen=True, slots=True)
class _Calls:
    wanted: Sequence[bool]
    pack: Pack
    solve: Solve
    unpack: Unpack


class _Pass:
    """One round of one rank: its buffers while it is under way."""

    def __init__(self, owner: OwnerGather, indices: Round) -> None:
        self.owner, plan = owner, owner.plan
        here = [index for index in indices if plan.home(index)[0] == owner.replica]
        self.elsewhere = [i for i in indices if i not in set(here) and i in owner.own]
        self.away = away_side(plan, here, owner.rank)
        self.home = home_side(plan, here, owner.rank)
        self.moves = any(plan.moved(index) for index in here)  # alike in the whole group
        self.jobs = [index for index in here if plan.roots[index] == owner.bin]
        self.shares = share_sides(plan, indices, owner.rank) if plan.replicas > 1 else ()
        self.slots: dict[int, list[Slot]] = {index: [] for index in self.jobs}
        for slot in self.home.slots:
            self.slots[slot.matrix].append(slot)

    def send(self, calls: _Calls) -> None:
        """Start to bring the matrices to their roots."""
        self.away_buffer, self.home_buffer = self._buffer(self.away), self._buffer(self.home)
        self.share_buffers = [self._buffer(side) for side in self.shares]
        for slot in self.away.slots:
            if calls.wanted[slot.matrix]:
                calls.pack(slot.matrix, _piece(self.away_buffer, slot))
        for index in self.elsewhere:
            if calls.wanted[index]:
                calls.pack(index, None)
        self.work = self._all_to_all(self.home_buffer, self.home, self.away_buffer, self.away)

    def solve(self, calls: _Calls) -> None:
        """Wait for the matrices, solve those of this rank, and start to send the results back."""
        self._wait()
        own_share = {}
        if self.shares:
            own_share = {s.matrix: s for s in self.shares[self.owner.replica].slots}
        for chunk in self.owner.chunks([index for index in self.jobs if calls.wanted[index]]):
            fulls = [self.owner.assemble(index, calls) for index in chunk]
            for index, full in zip(chunk, fulls, strict=True):
                for slot in self.slots[index]:
                    full.narrow(0, slot.start, slot.numel).copy_(_piece(self.home_buffer, slot))
            for index, result in zip(chunk, self.owner.solve(chunk, fulls, calls), strict=True):
                for slot in self.slots[index]:
                    _piece(self.home_buffer, slot).copy_(result.narrow(0, slot.start, slot.numel))
                own = self.owner.own.get(index)
                if own is None:
                    continue
                part = result.narrow(0, own.start, own.numel)
                if self.shares:
                    _piece(self.share_buffers[self.owner.replica], own_share[index]).copy_(part)
                else:
                    calls.unpack(index, part)
        self.work = self._all_to_all(self.away_buffer, self.away, self.home_buffer, self.home)

    def finish(self, calls: _Calls) -> None:
        """Wait for the results, exchange them between replicas, and hand them out."""
        self._wait()
        sides: tuple[Side, ...] = (self.away,)
        buffers = [self.away_buffer]
        if self.shares:
            self._share()
            sides, buffers = self.shares, self.share_buffers
        for side, buffer in zip(sides, buffers, strict=True):
            for slot in side.slots:
                if calls.wanted[slot.matrix]:
                    calls.unpack(slot.matrix, _piece(buffer, slot))
        del self.away_buffer, self.home_buffer, self.share_buffers, self.work

    def _share(self) -> None:
        replica = self.owner.replica
        places = {slot.matrix: slot for slot in self.shares[replica].slots}
        for slot in self.away.slots:
            target = _piece(self.share_buffers[replica], places[slot.matrix])
            target.copy_(_piece(self.away_buffer, slot))
        works = [
            dist.broadcast(buffer, group=self.owner.replica_group, group_src=source, async_op=True)
            for source, buffer in enumerate(self.share_buffers)
            if buffer.numel()  # alike on all replicas
        ]
        with waiting("exchange of an optimizer's results", group=self.owner.replica_group):
            for work in works:
                work.wait()

    def _wait(self) -> None:
        if self.work is not None:
            with waiting("exchange of an optimizer's matrices", group=self.owner.group):
                self.work.wait()

    def _buffer(self, side: Side) -> torch.Tensor:
        return torch.empty(side.numel, dtype=self.owner.dtype, device=self.owner.device)

    def _all_to_all(
        self, output: torch.Tensor, to: Side, source: torch.Tensor, origin: Side
    ) -> dist.Work | None:
        if not self.moves:
            return None
        return dist.all_to_all_single(
            output,
            source,
            list(to.splits),
            list(origin.splits),
            group=self.owner.group,
            async_op=True,
        )


def _piece(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    return buffer.narrow(0, slot.at, slot.numel)
