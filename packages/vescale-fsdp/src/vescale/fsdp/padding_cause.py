# SPDX-License-Identifier: Apache-2.0
"""Tell which tensor forces padding on its whole buffer, by planning without its blocks.

A block above a rank's even share sets the size of every shard, and so does the row of a tensor that
meets two boundaries. Sizes are in elements.
"""

from dataclasses import dataclass, replace

from vescale.fsdp.lanes import AnyPlan, LanePlan
from vescale.fsdp.planner import Plan, plan

MOST_TRIED = 8  # kinds of tensors with the largest blocks


@dataclass(frozen=True, slots=True)
class PaddingCause:
    """Tensors alike, in numel and block, and the padding that goes if they may be cut anywhere.

    ``fqns`` are in the order of the plan. ``padding`` is ``padding_numel`` over the elements of
    all tensors of the plan, like ``Plan.padding``.
    """

    fqns: tuple[str, ...]
    numel: int
    block: int
    padding_numel: int
    padding: float


def padding_causes(plan: AnyPlan, *, over: float = 0.1) -> tuple[PaddingCause, ...]:
    """Return the tensors that force more padding than ``over``, for each lane the worst of them.

    Empty where no tensors alike force as much: padding may come from several together. Plans a lane
    again for each of the largest blocks in it, but only where it has so much padding.
    """
    if not isinstance(plan, AnyPlan):
        raise TypeError(
            f"plan is a {type(plan).__name__}, expected what plan() or plan_lanes() returned."
        )
    lanes = plan.lanes if isinstance(plan, LanePlan) else (plan,)
    causes = []
    for lane in lanes:
        if lane.padding_numel > over * plan.numel:
            cause = _worst(lane, plan.numel)
            if cause is not None and cause.padding > over:
                causes.append(cause)
    return tuple(causes)


def _worst(lane: Plan, numel: int) -> PaddingCause | None:
    alike: dict[tuple[int, int], list[int]] = {}
    for index, request in enumerate(lane.requests):
        block = min(request.block, request.numel)
        if lane.align % max(1, block):  # else no boundary cuts it, and it forces nothing
            alike.setdefault((block, request.numel), []).append(index)
    worst = None
    for (block, size), indices in sorted(alike.items(), reverse=True)[:MOST_TRIED]:
        requests = list(lane.requests)
        for index in indices:
            requests[index] = replace(requests[index], block=1)
        free = plan(requests, lane.world_size, align=lane.align)
        saved = lane.padding_numel - free.padding_numel
        if saved > 0 and (worst is None or saved > worst.padding_numel):
            fqns = tuple(lane.requests[index].fqn for index in indices)
            worst = PaddingCause(fqns, size, block, saved, saved / numel)
    return worst
