# SPDX-License-Identifier: Apache-2.0
"""Check a plan against the invariants, with code of its own: nothing here calls the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vescale.fsdp.lanes import LanePlan
    from vescale.fsdp.planner import Plan

REMEDY = "this plan cannot be used, make it again with plan() or plan_lanes()."


def validate_plan(plan: Plan | LanePlan) -> None:
    """Raise RuntimeError, naming invariant and tensor, unless ``plan`` keeps all of I1 to I3.

    I1: the shard size is a positive multiple of ``align`` (0 only where every tensor is empty).
    I2: the tensors are disjoint and inside the buffer.
    I3: every shard boundary strictly inside a tensor is an edge of one of its blocks.

    In a plan of lanes each lane keeps them, and I4: every tensor is in exactly one lane, lanes
    follow each other without a gap, for the same ranks, and none is empty beside others.
    """
    if hasattr(plan, "lanes"):
        _check_lanes(plan)  # type: ignore[arg-type]  # a LanePlan
    else:
        _check_buffer(plan)


def _check_lanes(plan: LanePlan) -> None:
    def refuse(what: str) -> None:
        raise RuntimeError(f"I4: {what}; {REMEDY}")

    if len(plan.lanes) != len(plan.members) or not plan.lanes:
        refuse(f"{len(plan.lanes)} lanes have {len(plan.members)} lists of members")
    lane_of: dict[int, int] = {}
    starts: list[tuple[int, int]] = []
    shard_start = 0
    for number, (lane, members) in enumerate(zip(plan.lanes, plan.members, strict=True)):
        first = plan.lanes[0]
        if (lane.world_size, lane.align) != (first.world_size, first.align):
            refuse(f"lane {number} is for {lane.world_size} ranks and align={lane.align}")
        if len(lane.requests) != len(members) or list(members) != sorted(members):
            refuse(f"lane {number} of {len(lane.requests)} tensors has the members {members}")
        if len(plan.lanes) > 1 and not lane.shard_numel:
            refuse(f"lane {number} is empty")
        _check_buffer(lane)
        for place, index in enumerate(members):
            request = lane.requests[place]
            if not 0 <= index < len(plan.requests) or request != plan.requests[index]:
                refuse(f"{request.fqn} of lane {number} is not tensor {index} of the group")
            if index in lane_of:
                refuse(f"{request.fqn} is in lane {number} and in lane {lane_of[index]}")
            lane_of[index] = number
            start = plan.world_size * shard_start + lane.offsets[place] if request.numel else 0
            starts.append((index, start))
        shard_start += lane.shard_numel
    for index, request in enumerate(plan.requests):
        if index not in lane_of:
            refuse(f"{request.fqn} is in no lane")
    for index, start in starts:
        if plan.offsets[index] != start:
            fqn, found = plan.requests[index].fqn, plan.offsets[index]
            refuse(f"{fqn} starts at {found}, its lane puts it at {start}")


def _check_buffer(plan: Plan) -> None:
    shard, ranks = plan.shard_numel, plan.world_size
    pieces = sorted(
        (offset, offset + request.numel, index)
        for index, (request, offset) in enumerate(zip(plan.requests, plan.offsets, strict=True))
        if request.numel
    )
    if shard % plan.align or shard < 0 or (shard == 0 and pieces):
        raise RuntimeError(
            f"I1: shard_numel={shard} is no positive multiple of align={plan.align}; {REMEDY}"
        )
    end_before, before = 0, "the start of the buffer"
    for begin, end, index in pieces:
        request = plan.requests[index]
        if begin < end_before or end > ranks * shard:
            raise RuntimeError(
                f"I2: {request.fqn} lies in [{begin}, {end}), which overlaps {before} (ends at "
                f"{end_before}) or leaves the buffer of {ranks * shard} elements; " + REMEDY
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
        f"({(bad - begin) % block} elements into it); {REMEDY}"
    )
