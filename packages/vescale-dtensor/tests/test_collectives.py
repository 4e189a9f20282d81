# SPDX-License-Identifier: Apache-2.0
"""The collectives of every move, as a table: what a move costs is part of its contract."""

import itertools

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor
from vescale.dtensor.debug import CommDebugMode

# What the names below stand for on one axis of that many ranks; the tensor has 12 rows.
PLACEMENTS = {
    world_size: {
        "Replicate": Replicate(),
        "Shard(0)": Shard(0),
        "Shard(1)": Shard(1),
        "Partial": Partial(),
        "Ragged, even": RaggedShard((0,), [1] * world_size),
        "Ragged, uneven": RaggedShard((0,), uneven),
        "Ragged, lopsided": RaggedShard((0, 1), lopsided),
        "Ragged, one owner": RaggedShard((), [0] * (world_size - 1) + [1]),
    }
    for world_size, uneven, lopsided in (
        (2, (1, 2), (1, 59)),
        (3, (1, 2, 3), (1, 0, 59)),
        (4, (1, 2, 3, 0), (1, 0, 0, 59)),
    )
}
RAGGED = ("Ragged, even", "Ragged, uneven", "Ragged, lopsided", "Ragged, one owner")
ALL_TO_ALL, NOTHING = {"all-to-all": 1}, {}
# (from, to) -> collectives, on one mesh axis of 2, 3 or 4 ranks with gloo. On NCCL the two
# uneven gathers are one list all-gather.
ON_A_LINE = {
    ("Ragged, even", "Replicate"): {"all-gather": 1},
    ("Ragged, uneven", "Replicate"): {"all-gather": 1},  # padded, at most doubled
    ("Ragged, lopsided", "Replicate"): {"broadcast": 2},  # one per owner; on 2 ranks padded
    ("Ragged, one owner", "Replicate"): {"broadcast": 1},
    **{("Replicate", ragged): NOTHING for ragged in RAGGED},
    **dict.fromkeys(itertools.permutations(RAGGED, 2), ALL_TO_ALL),
    **{(ragged, shard): ALL_TO_ALL for ragged in RAGGED for shard in ("Shard(0)", "Shard(1)")},
    **{(shard, ragged): ALL_TO_ALL for ragged in RAGGED for shard in ("Shard(0)", "Shard(1)")},
    ("Partial", "Ragged, even"): {"reduce-scatter": 1},
    ("Partial", "Ragged, uneven"): ALL_TO_ALL,  # and a local sum
    ("Partial", "Ragged, lopsided"): ALL_TO_ALL,
    ("Partial", "Ragged, one owner"): {"reduce": 1},
    **{("distribute_tensor", ragged): ALL_TO_ALL for ragged in RAGGED},
}
# The same on a (2, 2) mesh: one placement for each axis.
R, S0, S1, P = "Replicate", "Shard(0)", "Shard(1)", "Partial"
EVEN, UNEVEN, _, OWNER = RAGGED
ON_A_SQUARE = {
    ((EVEN, S0), (R, S0)): {"all-gather": 1},
    ((EVEN, S1), (R, S1)): {"all-gather": 1},
    ((R, UNEVEN), (R, R)): {"all-gather": 1},
    ((R, S0), (UNEVEN, S0)): NOTHING,
    ((R, S1), (R, UNEVEN)): {"all-to-all": 1},
    ((EVEN, S0), (UNEVEN, S0)): {"all-to-all": 1},
    ((EVEN, S1), (S0, S1)): {"all-to-all": 1},
    ((S0, EVEN), (S0, S1)): {"all-to-all": 1},
    ((S0, S1), (UNEVEN, S1)): {"all-to-all": 1},
    ((P, R), (UNEVEN, R)): {"all-to-all": 1},
    ((P, S0), (EVEN, S0)): {"reduce-scatter": 1},
    ((P, P), (EVEN, R)): {"reduce-scatter": 1, "all-reduce": 1},
    ((P, P), (EVEN, P)): {"reduce-scatter": 1},
    ((EVEN, P), (UNEVEN, P)): {"all-to-all": 1},
    ((EVEN, P), (EVEN, R)): {"all-reduce": 1},
    ((P, UNEVEN), (R, UNEVEN)): {"all-reduce": 1},
    # Several axes change: through what the plain placements leave.
    ((UNEVEN, R), (R, UNEVEN)): {"all-gather": 1},
    ((OWNER, R), (R, EVEN)): {"broadcast": 1},
    ((EVEN, S0), (UNEVEN, R)): {"all-gather": 2},
    ((R, EVEN), (S0, EVEN)): {"all-gather": 1},
    ((EVEN, R), (UNEVEN, S0)): {"all-gather": 1},
}
NAMES = {
    "allgather": "all-gather",
    "allgather_base": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}


def counted(mode):
    """Return what ``mode`` counted, by the names of the tables."""
    counts = {}
    for operator, count in mode.get_comm_counts().items():
        name = NAMES[str(operator).split(".")[-1].strip("_")]
        counts[name] = counts.get(name, 0) + count
    return counts


def make(whole, mesh, placements):
    """Return a DTensor whose value is ``whole`` for Partial axes that hold one part of the sum."""
    pending = [p.is_partial() for p in placements]
    base = [Replicate() if partial else p for partial, p in zip(pending, placements, strict=True)]
    x = distribute_tensor(whole, mesh, base, src_data_rank=None)
    parts = [mesh.size(axis) for axis, partial in enumerate(pending) if partial]
    local = x.to_local() / torch.Size(parts).numel()
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())


def check_moves(mesh, table):
    shape, whole = mesh.shape, torch.arange(60.0, device=DEVICE).view(12, 5)
    for (source, target), expected in table.items():
        ends = [
            [PLACEMENTS[size][name] for name, size in zip(end, shape, strict=True)]
            if isinstance(end, tuple)
            else [PLACEMENTS[shape[0]].get(end)]
            for end in (source, target)
        ]
        with CommDebugMode() as mode:
            if source == "distribute_tensor":
                moved = distribute_tensor(whole, mesh, ends[1])
        if source != "distribute_tensor":
            x = make(whole, mesh, ends[0])
            with CommDebugMode() as mode:
                moved = x.redistribute(mesh, ends[1])
        if expected == {"broadcast": 2} and (DEVICE == "cuda" or shape == (2,)):
            expected = {"all-gather": 1}
        assert counted(mode) == expected, (source, target)
        assert moved.placements == tuple(ends[1])
        torch.testing.assert_close(moved.full_tensor(), whole)


def check_every_mesh(rank, world_size):
    """Meshes of 2, 3 and 4 of the ranks, and of 2 by 2."""
    for size in (2, 3, 4):
        mesh = DeviceMesh(DEVICE, list(range(size)))  # all ranks make it, and some are not in it
        if rank < size:
            check_moves(mesh, ON_A_LINE)
    check_moves(init_device_mesh(DEVICE, (2, 2)), ON_A_SQUARE)


def test_moves_cost_what_the_tables_say(run_ranks):
    run_ranks(check_every_mesh, 4, exact=True)
