# SPDX-License-Identifier: Apache-2.0
"""Moves that one collective over one mesh axis does: what is sent, and what is made of it.

Every move is pack, one collective on flat memory, unpack. Moves of one kind can therefore share
a collective: what goes to one rank is laid side by side.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale.dtensor import comm, shard_exchange
from vescale.dtensor import spec as specs
from vescale.dtensor._torch_compat import DTensorSpec
from vescale.dtensor.layout import chunk_numels, exchange_counts
from vescale.dtensor.placement import RaggedShard
from vescale.dtensor.spec import layout_of
from vescale.dtensor.waiting import Pending

Step = Callable[[torch.Tensor], torch.Tensor]


def _flatten(local: torch.Tensor) -> torch.Tensor:
    return local.reshape(-1)


def _same(flat: torch.Tensor) -> torch.Tensor:
    return flat


@dataclass(frozen=True)
class Move:
    """One move of a local tensor over mesh axis ``axis``.

    ``kind`` is "exchange", "gather", "reduce_scatter", "all_reduce", or "local" for a move
    without communication. ``pack`` makes flat memory, in the order of the ranks that get it:
    ``send[i]`` elements for rank i (one number where all get the same). ``receive`` counts what
    arrives, from every rank, or once for a reduction; ``unpack`` makes the new local tensor of
    it, perhaps a view. ``op`` is the reduction.
    """

    kind: str
    axis: int
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    pack: Step = _flatten
    unpack: Step = _same
    op: str | None = None


def find_move(spec: DTensorSpec, target_spec: DTensorSpec) -> Move | None:
    """Return the move from ``spec`` to ``target_spec``, or None when it takes several steps.

    Both are of one tensor on one mesh, which this rank is in. No communication.
    """
    source, target = spec.placements, target_spec.placements
    changed = [axis for axis in range(len(source)) if source[axis] != target[axis]]
    if len(changed) != 1 or not all(map(_is_known, (*source, *target))):
        return None
    axis = changed[0]
    old, new = source[axis], target[axis]
    if old.is_partial() and old.reduce_op not in comm.REDUCE_OPS:  # type: ignore[attr-defined]  # Partial
        return None
    if old.is_partial() and new.is_replicate():
        shape = specs.local_shape(spec)
        one = (math.prod(shape),)
        copied = lambda local: local.reshape(-1).clone()  # noqa: E731
        op = old.reduce_op  # type: ignore[attr-defined]  # Partial
        return Move("all_reduce", axis, one, one, copied, lambda f: f.view(shape), op)
    others = specs.replace(source, axis, Replicate())
    if specs.ragged_axis(others) is not None:  # its cut comes after this one
        return None
    if not _is_last_cut(source, axis) or not _is_last_cut(target, axis):
        return None
    return _find(old, new, axis, spec, target_spec)


def _find(
    old: Placement, new: Placement, axis: int, spec: DTensorSpec, target_spec: DTensorSpec
) -> Move | None:
    """Return the move on the block that the other axes leave."""
    rank, world_size = spec.mesh.get_local_rank(axis), spec.mesh.size(axis)
    before, after = layout_of(spec), layout_of(target_spec)
    shape = _block_shape(spec, axis)
    match old, new:
        case RaggedShard(), RaggedShard():
            if before.split_runs == after.split_runs:  # other names for the same ranges
                return Move("local", axis, pack=_same)
            send, receive = exchange_counts(before.split_numels, after.split_numels, rank)
            return Move("exchange", axis, tuple(send), tuple(receive))
        case RaggedShard(), Shard():
            return Move("exchange", axis, *shard_exchange.ragged_to_shard(before, new.dim, rank))
        case Shard(), RaggedShard():
            return Move("exchange", axis, *shard_exchange.shard_to_ragged(after, old.dim, rank))
        case RaggedShard(), Replicate():
            numels = before.split_numels
            return Move("gather", axis, (numels[rank],), numels, unpack=lambda f: f.view(shape))
        case Replicate(), RaggedShard():
            start, end = after.start, after.end
            return Move("local", axis, unpack=lambda flat: flat[start:end].clone())
        case Partial(), RaggedShard():
            numels = after.split_numels
            return Move("reduce_scatter", axis, numels, (numels[rank],), op=old.reduce_op)
        case Shard(dim=dim), Replicate():
            chunks = _chunk_shapes(shape, dim, world_size)
            numels = tuple(map(math.prod, chunks))
            joined = lambda flat: _join(flat, chunks, dim)  # noqa: E731
            return Move("gather", axis, (numels[rank],), numels, unpack=joined)
        case Partial(), Shard(dim=dim):
            chunks = _chunk_shapes(shape, dim, world_size)
            numels = tuple(map(math.prod, chunks))
            mine = chunks[rank]
            return Move(
                "reduce_scatter",
                axis,
                numels,
                (numels[rank],),
                lambda local: _cut(local, chunks, dim),
                lambda flat: flat.view(mine),
                old.reduce_op,
            )
    return None


def run(move: Move, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Do one move; the result may be ``local`` itself when nothing changes."""
    if move.kind == "local":
        return move.unpack(move.pack(local))
    return move.unpack(_start(move, move.pack(local), group, async_op=False).wait())


def start(
    moves: Sequence[Move],
    locals_: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    async_op: bool = True,
) -> list[Callable[[], torch.Tensor]]:
    """Begin ``moves`` of one kind, axis and ``op``, and tensors of one dtype, in one collective.

    Returns, for each move, a function that waits for the collective and returns the new local
    tensor. The tensors must not change before. Several share no memory afterwards.
    """
    packed = [move.pack(local) for move, local in zip(moves, locals_, strict=True)]
    if len(moves) == 1:
        pending = _start(moves[0], packed[0], group, async_op)
        return [lambda: moves[0].unpack(pending.wait())]
    parts = [flat.split(move.send) for flat, move in zip(packed, moves, strict=True)]
    together = torch.cat(list(chain.from_iterable(zip(*parts, strict=True))))
    total = replace(moves[0], send=_totals(moves, "send"), receive=_totals(moves, "receive"))
    pending = _start(total, together, group, async_op)
    lengths = list(chain.from_iterable(zip(*(move.receive for move in moves), strict=True)))

    def finish(index: int) -> torch.Tensor:
        pieces = pending.wait().split(lengths)
        return moves[index].unpack(torch.cat(pieces[index :: len(moves)]))

    return [functools.partial(finish, index) for index in range(len(moves))]


def _start(move: Move, flat: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Pending:
    match move.kind:
        case "exchange":
            return comm.start_exchange(flat, move.send, move.receive, group, async_op)
        case "gather":
            return comm.start_gather(flat, move.receive, group, async_op)
        case "reduce_scatter":
            return comm.start_reduce_scatter(flat, move.send, move.op, group, async_op)
        case "all_reduce":
            return comm.start_all_reduce(flat, move.op, group, async_op)
    raise RuntimeError(f"a {move.kind} move has no collective to start.")


def _totals(moves: Sequence[Move], side: str) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(getattr(move, side) for move in moves), strict=True)))


def _is_known(placement: Placement) -> bool:
    return type(placement) in (Replicate, Shard, Partial) or isinstance(placement, RaggedShard)


def _is_last_cut(placements: Sequence[Placement], axis: int) -> bool:
    """Tell whether ``axis`` cuts what the other placements left, as a ragged cut does.

    torch cuts one dim from the left-most mesh axis to the right-most.
    """
    mine = placements[axis]
    return not mine.is_shard() or mine not in placements[axis + 1 :]


def _block_shape(spec: DTensorSpec, axis: int) -> tuple[int, ...]:
    placements = specs.replace(spec.placements, axis, Replicate())
    mesh, shape = spec.mesh, tuple(spec.tensor_meta.shape)
    return specs.base_block(shape, placements, mesh.shape, mesh.get_coordinate())[0]


def _chunk_shapes(shape: tuple[int, ...], dim: int, world_size: int) -> list[tuple[int, ...]]:
    lengths = chunk_numels(shape[dim], world_size)
    return [(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths]


def _cut(whole: torch.Tensor, chunks: list[tuple[int, ...]], dim: int) -> torch.Tensor:
    if dim == 0:
        return whole.reshape(-1)
    parts = whole.split([chunk[dim] for chunk in chunks], dim)
    return torch.cat([part.reshape(-1) for part in parts])


def _join(flat: torch.Tensor, chunks: list[tuple[int, ...]], dim: int) -> torch.Tensor:
    if dim == 0:
        rows = sum(chunk[0] for chunk in chunks)
        return flat.view(rows, *chunks[0][1:])
    parts = flat.split(list(map(math.prod, chunks)))
    return torch.cat([part.view(chunk) for part, chunk in zip(parts, chunks, strict=True)], dim)
