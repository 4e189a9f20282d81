# SPDX-License-Identifier: Apache-2.0
"""Check a plan against the invariants, with code of its own: nothing here calls the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vescale.fsdp.planner import Plan


def validate_plan(plan: Plan) -> None:
    """Raise RuntimeError, naming invariant and tensor, unless ``plan`` keeps all of I1 to I3.

    I1: the shard size is a positive multiple of ``align`` (0 only where every tensor is empty).
    I2: the tensors are disjoint and inside the buffer.
    I3: every shard boundary strictly inside a tensor is an edge of one of its blocks.
    """
    shard, ranks = plan.shard_numel, plan.world_size
    pieces = sorted(
        (offset, offset + request.numel, index)
        for index, (request, offset) in enumerate(zip(plan.requests, plan.offsets, strict=True))
        if request.numel
    )
    if shard % plan.align or shard < 0 or (shard == 0 and pieces):
        raise RuntimeError(
            f"I1: shard_numel={shard} is no positive multiple of align={plan.align}; "
            "this plan cannot be used, make it again with plan()."
        )
    end_before, before = 0, "the start of the buffer"
    for begin, end, index in pieces:
        request = plan.requests[index]
        if begin < end_before or end > ranks * shard:
            raise RuntimeError(
                f"I2: {request.fqn} lies in [{begin}, {end}), which overlaps {before} (ends at "
                f"{end_before}) or leaves the buffer of {ranks * shard} elements; "
                "this plan cannot be used, make it again with plan()."
            )
        end_before, before = end, request.fqn
        _check_edges(request.fqn, begin, end, min(request.block, request.numel), shard)


def _check_edges(fqn: str, begin: int, end: int, block: int, shard: int) -> None:
    first = (begin // shard + 1) * shard
    if first >= end:
        return
    # The boundaries inside are first, first + shard, ...: all of them are block edges when the
    # first is and, if there is a second, the step between them is.
    if (first - begin) % block:
        bad = first
    elif first + shard < end and shard % block:
        bad = first + shard
    else:
        return
    raise RuntimeError(
        f"I3: {fqn} starts at {begin} and the shard boundary at {bad} cuts a block of {block} "
        f"({(bad - begin) % block} elements into it); "
        "this plan cannot be used, make it again with plan()."
    )
