# SPDX-License-Identifier: Apache-2.0
"""Row 56: whatever is chosen for memory and speed, the numbers are the same."""

import itertools

import torch

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import (
    Elements,
    MixedPrecisionPolicy,
    Rows,
    Whole,
    fully_shard,
    iter_full_parameters,
)

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": HALF,
    "bf16 reduced": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}
FORWARD = [None, True, False, 1]
BACKWARD = [True, False]
GRANULARITY = [Elements(), Rows(5), Whole()]
UNITS = ["every part", "blocks", "root only"]
PREFETCH = ["observed", "none", "two ahead"]
SYNC = ["each", "last"]


def pairs(*choices):
    """Return combinations in which each two choices of any two settings meet."""
    left = {
        (i, a, j, b)
        for (i, first), (j, second) in itertools.combinations(enumerate(choices), 2)
        for a in first
        for b in second
    }
    chosen = []
    rows = list(itertools.product(*choices))
    while left:
        covered = [
            {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(row), 2)} & left
            for row in rows
        ]
        best = max(range(len(rows)), key=lambda k: len(covered[k]))
        left -= covered[best]
        chosen.append(rows[best])
    return chosen


def parts_of(model, units):
    if units == "root only":
        return []
    if units == "blocks":
        return list(model.layers)
    return [model.embed, *model.layers, model.norm, model.head]


def set_prefetch(model, parts, prefetch):
    if prefetch == "observed":
        return
    ahead = 0 if prefetch == "none" else 2
    for index, part in enumerate(parts):
        part.set_modules_to_forward_prefetch(parts[index + 1 : index + 1 + ahead])
        part.set_modules_to_backward_prefetch(parts[max(0, index - ahead) : index][::-1])


def train(rank, policy, sync, forward, backward, granularity, units, prefetch):
    """Return the losses and parameters of two steps of two micro-batches each."""
    model = build(layers=2).to(DEVICE)
    options = {
        "mp_policy": POLICIES[policy],
        "reshard_after_forward": forward,
        "granularity": granularity,
    }
    parts = parts_of(model, units)
    for part in parts:
        fully_shard(part, **options)
    fully_shard(model, **options)
    set_prefetch(model, parts, prefetch)
    model.set_reshard_after_backward(backward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(2):
        for half in range(2):
            model.set_requires_gradient_sync(sync == "each" or half == 1)
            loss = loss_of(model, batch(2 * step + half, rank, DEVICE))
            loss.backward()
            seen.append(loss.detach())
        model.reshard()
        for part in parts:
            part.reshard()
        optimizer.step()
        optimizer.zero_grad()
    return seen + [value.clone() for _, value in iter_full_parameters(model)]


def check_pairs(rank, world_size):
    for policy in POLICIES:
        for sync in SYNC:
            expected = None
            for row in pairs(FORWARD, BACKWARD, GRANULARITY, UNITS, PREFETCH):
                seen = train(rank, policy, sync, *row)
                # Reductions of two ranks are sums of two numbers, in whichever order.
                expected = seen if expected is None else expected
                for a, b in zip(seen, expected, strict=True):
                    assert torch.equal(a, b), (policy, sync, row)


def test_every_pair_of_options_gives_the_same_bits(run_ranks):
    run_ranks(check_pairs, 2)


def test_pairs_meet():
    rows = pairs([1, 2, 3], "ab", [True, False])
    assert {(r[0], r[1]) for r in rows} == set(itertools.product([1, 2, 3], "ab"))
    assert {(r[1], r[2]) for r in rows} == set(itertools.product("ab", [True, False]))
    assert len(rows) == 6
