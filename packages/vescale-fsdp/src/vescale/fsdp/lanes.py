# SPDX-License-Identifier: Apache-2.0
"""Lay the tensors of a group out in lanes: a few buffers that are gathered in one launch.

One tensor with an awkward row can force padding on all others of its buffer. In a lane of its own
it does not, at the price of one more collective in the same launch. Sizes are in elements.

The price: ``benchmarks/lanes.py`` fits gathers of 1, 2 and 3 lanes of equal total size. On gloo, 2
ranks of one busy machine, a further lane took from 57 us at 0.83 GB/s of shard to 430 us at 0.13
GB/s: as long as 46, 76 and 54 KiB of every rank's shard in three runs. That is latency times
bandwidth, which load moves little; and a ring of more ranks has more steps for a lane and for a
byte alike. So the price is in bytes of a shard, whatever the number of ranks. Runs of 4 ranks
scattered too much to tell, and NCCL is not measured yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

from vescale.fsdp.lane_search import MOST_LANES, LaneSearch
from vescale.fsdp.planner import Plan, Request, Sizes, checked_integer, plan
from vescale.fsdp.validate import validate_plan

__all__ = ["LANE_NBYTES", "AnyPlan", "LanePlan", "check_lanes", "plan_lanes"]

LANE_NBYTES = 64 * 1024  # what a lane costs, in bytes of every rank's shard


@dataclass(frozen=True)
class LanePlan(Sizes):
    """Which tensors are in which lane, and the plan of each lane.

    ``lanes[k].requests[j]`` is ``requests[members[k][j]]``; members are ascending. A rank's shard
    has the lanes' shards one after the other: lane ``k`` is ``[shard_starts[k], shard_starts[k] +
    lanes[k].shard_numel)`` of it. The full buffer has the lanes' buffers one after the other, so
    that lane ``k`` is gathered from one interval into one, ``lane_ranges``, and every tensor is one
    interval of the full buffer: ``offsets``. Otherwise a LanePlan answers what a Plan answers, and
    with one lane it answers the same.
    """

    requests: tuple[Request, ...]
    lanes: tuple[Plan, ...]
    members: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(plan: Plan) -> "LanePlan":
        """Return ``plan`` as the only lane."""
        return LanePlan(plan.requests, (plan,), (tuple(range(len(plan.requests))),))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.lanes[0].world_size

    @property
    def align(self) -> int:
        """What the shard size of each lane is a multiple of."""
        return self.lanes[0].align

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a rank's shard, of all lanes together."""
        return sum(lane.shard_numel for lane in self.lanes)

    @cached_property
    def shard_starts(self) -> tuple[int, ...]:
        """Where each lane starts in a rank's shard."""
        return tuple(accumulate((lane.shard_numel for lane in self.lanes[:-1]), initial=0))

    @cached_property
    def lane_ranges(self) -> tuple[tuple[int, int, int, int], ...]:
        """``(shard_start, shard_numel, full_start, full_numel)`` of each lane: one collective.

        The first two are in a rank's shard, the others in the full buffer.
        """
        return tuple(
            (start, lane.shard_numel, start * self.world_size, lane.buffer_numel)
            for start, lane in zip(self.shard_starts, self.lanes, strict=True)
        )

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """``(lane, index in the lane)`` of each request."""
        found = {
            index: (lane, place)
            for lane, indices in enumerate(self.members)
            for place, index in enumerate(indices)
        }
        return tuple(found[index] for index in range(len(self.requests)))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each request starts in the full buffer; 0 for an empty one, which lies nowhere."""
        return tuple(
            self.lane_ranges[lane][2] + self.lanes[lane].offsets[place] if request.numel else 0
            for request, (lane, place) in zip(self.requests, self.places, strict=True)
        )

    def local_range(self, index: int, rank: int) -> tuple[int, int, int]:
        """Return ``(start_in_tensor, start_in_shard, numel)`` as ``Plan.local_range`` does.

        ``start_in_shard`` counts from the start of the rank's shard of all lanes.
        """
        lane, place = self.places[index]
        begin, start, numel = self.lanes[lane].local_range(place, rank)
        return begin, self.shard_starts[lane] + start, numel

    def shard_sizes(self, index: int) -> tuple[int, ...]:
        """Return how many elements of tensor ``index`` each rank holds: [world_size]."""
        lane, place = self.places[index]
        return self.lanes[lane].shard_sizes(place)

    def shard_runs(self, index: int) -> tuple[tuple[int, int], ...]:
        """Return ``shard_sizes`` run-length encoded, at most five ``(numel, ranks)``; O(1)."""
        lane, place = self.places[index]
        return self.lanes[lane].shard_runs(place)


AnyPlan = Plan | LanePlan


def check_lanes(lanes: int | Literal["auto"]) -> None:
    """Raise ValueError unless ``lanes`` is what ``plan_lanes`` takes."""
    number = isinstance(lanes, int) and not isinstance(lanes, bool)
    if lanes != "auto" and not (number and 1 <= lanes <= MOST_LANES):
        raise ValueError(f"lanes={lanes!r}; pass 'auto' or an integer from 1 to {MOST_LANES}.")


def plan_lanes(
    requests: Sequence[Request],
    world_size: int,
    *,
    align: int = 1,
    lanes: int | Literal["auto"] = "auto",
    itemsize: int = 2,
    lane_nbytes: int = LANE_NBYTES,
) -> LanePlan:
    """Return a valid plan in lanes, with padding as small as the search finds.

    With ``lanes="auto"`` there are up to 3, of least ``shard_numel * itemsize + lane_nbytes *
    lanes``; so more than one only where it is predicted to pay, and never a larger shard than with
    one. ``lanes=1`` gives what ``plan`` gives; 2 or 3 give exactly so many, with less only where
    there are fewer tensors that are not empty. ``itemsize`` is in bytes, of the dtype that is
    gathered.

    The result depends on sizes and options only, as that of ``plan``; equal groups are planned
    once. Raises TypeError or ValueError for sizes that are no positive integers, and ValueError for
    other ``lanes``.
    """
    check_lanes(lanes)
    itemsize = checked_integer(itemsize, "itemsize", 1)
    lane_nbytes = checked_integer(lane_nbytes, "lane_nbytes", 0)
    single = plan(requests, world_size, align=align)
    kept = tuple(index for index, request in enumerate(single.requests) if request.numel)
    if lanes == 1 or len(kept) < 2:
        return LanePlan.of(single)
    sizes = tuple((r.numel, min(r.block, r.numel)) for r in single.requests if r.numel)
    counts = range(1, MOST_LANES + 1) if lanes == "auto" else (min(lanes, len(kept)),)
    divided = _divide(
        sizes,
        single.world_size,
        single.align,
        single.shard_numel,
        tuple(counts),
        itemsize,
        lane_nbytes,
    )
    if len(divided) == 1:
        return LanePlan.of(single)
    members = [[kept[place] for place in lane] for lane in divided]
    empty = [index for index, request in enumerate(single.requests) if not request.numel]
    members[0] = sorted(members[0] + empty)
    result = LanePlan(
        single.requests,
        tuple(
            plan([single.requests[index] for index in lane], world_size, align=align)
            for lane in members
        ),
        tuple(map(tuple, members)),
    )
    saved = (single.shard_numel - result.shard_numel) * itemsize
    if lanes == "auto" and saved <= (len(members) - 1) * lane_nbytes:
        return LanePlan.of(single)
    validate_plan(result)
    return result


@lru_cache(maxsize=4096)
def _divide(
    sizes: tuple[tuple[int, int], ...],
    world_size: int,
    align: int,
    single: int,
    counts: tuple[int, ...],
    itemsize: int,
    lane_nbytes: int,
) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the tensors in each lane; ``single`` is the shard size of one lane."""
    search = LaneSearch(sizes, world_size, align, single, least=min(counts))
    lanes = search.best(counts, itemsize, lane_nbytes)
    return tuple(tuple(search.members(lane)) for lane in lanes)
