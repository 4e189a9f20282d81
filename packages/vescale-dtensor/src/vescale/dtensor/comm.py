# SPDX-License-Identifier: Apache-2.0
"""Collectives on flat tensors with a different number of elements on every rank; any backend.

``numels`` always lists the elements of every rank of the group, in rank order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale.dtensor._torch_compat import all_gather_single, reduce_scatter_single
from vescale.dtensor.waiting import Pending

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # and a division: gloo has no average
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
# What gloo and NCCL both carry; every other dtype travels as its bytes.
_CARRIED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
}


def exchange(
    flat: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send ``send[i]`` elements of ``flat`` to rank i; return what arrives, in rank order."""
    return start_exchange(flat, send, receive, group, async_op=False).wait()


def start_exchange(
    flat: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: dist.ProcessGroup,
    async_op: bool = True,
) -> Pending:
    """Begin an ``exchange``; ``flat`` must not change before it ends."""
    flat = _plain_memory(flat)
    out = flat.new_empty(sum(receive))
    source, target, scale = _carried(flat), _carried(out), _bytes_per_element(flat)
    work = dist.all_to_all_single(
        target,
        source,
        [numel * scale for numel in receive],
        [numel * scale for numel in send],
        group=group,
        async_op=async_op,
    )
    return Pending([work], lambda: out)


def gather(flat: torch.Tensor, numels: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the parts of all ranks, one after the other: ``[sum(numels)]``.

    Equal parts go in one all-gather. Else NCCL gathers a list; other backends gather padded parts
    while that at most doubles the payload, and broadcast from every owner beyond.
    """
    return start_gather(flat, numels, group, async_op=False).wait()


def start_gather(
    flat: torch.Tensor, numels: Sequence[int], group: dist.ProcessGroup, async_op: bool = True
) -> Pending:
    """Begin a ``gather``; ``flat`` must not change before it ends."""
    flat = _plain_memory(flat)
    out = flat.new_empty(sum(numels))
    source, target, scale = _carried(flat), _carried(out), _bytes_per_element(flat)
    largest, owners = max(numels), [rank for rank, numel in enumerate(numels) if numel]
    if largest * len(numels) == sum(numels):
        work = all_gather_single(target, source, group=group, async_op=async_op)
        return Pending([work], lambda: out)
    parts = list(target.split([numel * scale for numel in numels]))
    if len(owners) > 1 and source.is_cuda and "nccl" in dist.get_backend(group):
        return Pending(
            [dist.all_gather(parts, source, group=group, async_op=async_op)], lambda: out
        )
    if len(owners) > 1 and largest * len(numels) <= 2 * sum(numels):
        padded = source.new_zeros(largest * scale)
        padded[: source.numel()].copy_(source)
        gathered = source.new_empty(largest * scale * len(numels))

        def unpad() -> torch.Tensor:
            for part, row in zip(parts, gathered.view(len(numels), -1), strict=True):
                part.copy_(row[: part.numel()])
            return out

        work = all_gather_single(gathered, padded, group=group, async_op=async_op)
        return Pending([work], unpad)
    parts[dist.get_rank(group)].copy_(source)
    works = [
        dist.broadcast(parts[owner], group_src=owner, group=group, async_op=async_op)
        for owner in owners
    ]
    return Pending(works, lambda: out)


def scatter(
    flat: torch.Tensor, numels: Sequence[int], source: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return this rank's part of ``flat`` of rank ``source``; other ranks' data is not read.

    One all-to-all in which only the source sends.
    """
    rank = dist.get_rank(group)
    send = list(numels) if rank == source else [0] * len(numels)
    receive = [numels[rank] if peer == source else 0 for peer in range(len(numels))]
    return exchange(flat if rank == source else flat[:0], send, receive, group)


def broadcast(flat: torch.Tensor, source: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return ``flat`` of rank ``source`` (a new tensor on the others)."""
    flat = _plain_memory(flat)
    out = flat if dist.get_rank(group) == source else torch.empty_like(flat)
    dist.broadcast(_carried(out), group_src=source, group=group)
    return out


def reduce_scatter(
    flat: torch.Tensor, numels: Sequence[int], op: str, group: dist.ProcessGroup
) -> torch.Tensor:
    """Reduce ``flat`` (``[sum(numels)]`` on every rank) and return this rank's part.

    Equal parts: one reduce-scatter. A single owner: a reduce to it. Else one all-to-all
    and a local reduction, which sums half types in float32.
    """
    return start_reduce_scatter(flat, numels, op, group, async_op=False).wait()


def start_reduce_scatter(
    flat: torch.Tensor,
    numels: Sequence[int],
    op: str,
    group: dist.ProcessGroup,
    async_op: bool = True,
) -> Pending:
    """Begin a ``reduce_scatter``; ``flat`` must not change before it ends."""
    flat = _plain_memory(flat)
    rank, world_size = dist.get_rank(group), len(numels)
    owners = [peer for peer, numel in enumerate(numels) if numel]
    options: dict[str, Any] = {"op": REDUCE_OPS[op], "group": group, "async_op": async_op}
    if len(owners) == world_size and len(set(numels)) == 1:
        out = flat.new_empty(numels[rank])
        work = reduce_scatter_single(_as_real(out), _as_real(flat), **options)
        return Pending([work], lambda: _averaged(out, op, world_size))
    if len(owners) == 1:
        whole = flat.clone()
        work = dist.reduce(_as_real(whole), group_dst=owners[0], **options)
        out = whole if rank == owners[0] else whole.new_empty(0)
        return Pending([work], lambda: _averaged(out, op, world_size))
    exchanged = start_exchange(flat, numels, [numels[rank]] * world_size, group, async_op)
    return Pending([], lambda: _reduce_rows(exchanged.wait().view(world_size, numels[rank]), op))


def all_reduce(flat: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the reduction of ``flat`` over the group, in place where ``flat`` is contiguous."""
    return start_all_reduce(flat, op, group, async_op=False).wait()


def start_all_reduce(
    flat: torch.Tensor, op: str, group: dist.ProcessGroup, async_op: bool = True
) -> Pending:
    """Begin an ``all_reduce``."""
    out = _plain_memory(flat)
    work = dist.all_reduce(_as_real(out), op=REDUCE_OPS[op], group=group, async_op=async_op)
    return Pending([work], lambda: _averaged(out, op, dist.get_world_size(group)))


def _averaged(total: torch.Tensor, op: str, world_size: int) -> torch.Tensor:
    return total.div_(world_size) if op == "avg" else total


def _reduce_rows(rows: torch.Tensor, op: str) -> torch.Tensor:
    if op == "sum":
        return rows.sum(0, dtype=rows.dtype)
    if op == "avg":
        return rows.mean(0)
    if op == "product":
        return rows.prod(0, dtype=rows.dtype)
    if rows.shape[1] == 0:
        return rows.new_empty(0)
    return rows.amax(0) if op == "max" else rows.amin(0)


def _plain_memory(flat: torch.Tensor) -> torch.Tensor:
    """Return contiguous memory with no pending conjugation or negation."""
    flat = flat.resolve_conj().resolve_neg().contiguous()
    if flat.ndim and flat.stride(-1) != 1:  # one element or none: any stride is contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat


def is_carried(dtype: torch.dtype) -> bool:
    """Tell whether every backend moves ``dtype`` as it is, not as bytes."""
    return dtype in _CARRIED


def _carried(flat: torch.Tensor) -> torch.Tensor:
    return flat if flat.dtype in _CARRIED else flat.view(-1).view(torch.uint8)


def _bytes_per_element(flat: torch.Tensor) -> int:
    """Return how many carried elements stand for one of ``flat``."""
    return 1 if flat.dtype in _CARRIED else flat.element_size()


def _as_real(flat: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(flat) if flat.is_complex() else flat
