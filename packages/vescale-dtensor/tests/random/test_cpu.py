# SPDX-License-Identifier: Apache-2.0
"""One process plays every rank: its part must be that of the whole, and the generator's end too."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from vescale.dtensor import RaggedShard, _StridedShard
from vescale.dtensor.random import cpu, mt19937
from vescale.dtensor.random.parts import strips_of

aten = torch.ops.aten
OPERATORS = [
    (aten.uniform_.default, (-1.0, 2.0)),
    (aten.normal_.default, (0.5, 2.0)),
    (aten.bernoulli_.float, (0.3,)),
    (aten.exponential_.default, (1.5,)),
    (aten.log_normal_.default, (1.0, 2.0)),
    (aten.cauchy_.default, ()),
    (aten.geometric_.default, (0.3,)),
    (aten.random_.to, (100,)),
]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def check(func, args, dtype, shape, strips, contiguous=True):
    torch.manual_seed(7)
    torch.rand(3)
    before = torch.get_rng_state()
    numel = torch.Size(shape).numel()
    whole = torch.empty(numel * (1 if contiguous else 2), dtype=dtype)[:: 1 if contiguous else 2]
    func(whole, *args)
    after = torch.get_rng_state()
    local = torch.full((sum(strip.numel for strip in strips),), 9, dtype=dtype)
    torch.set_rng_state(before)
    cpu.fill_part(func, args, numel, strips, local, None, contiguous)
    parts = [whole[a : a + n] for strip in strips for a, n in strip.segments()]
    assert torch.equal(local, torch.cat(parts) if parts else local[:0])
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("shape", [(1, 17), (7, 5), (3, 4), (5, 3, 7), (33, 70), ()])
def test_every_layout_of_every_operator(shape):
    numel, dims = torch.Size(shape).numel(), range(len(shape))
    layouts = [((3,), [Shard(dim)]) for dim in dims]
    layouts += [((2, 3), [Shard(one), Shard(two)]) for one in dims for two in dims]
    layouts += [((2, 2), [Replicate(), Shard(dim)]) for dim in dims]
    if dims:
        layouts += [
            ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
            ((2,), [_StridedShard(len(shape) - 1, split_factor=3)]),
            ((4,), [RaggedShard(tuple(dims), (1, 0, numel - 3, 2))]),
            ((2, 2), [RaggedShard((0,), (1, 0)), Shard(len(shape) - 1)]),
        ]
    for (func, args), dtype in itertools.product(OPERATORS, DTYPES):
        for mesh, placements in layouts:
            for coordinate in itertools.product(*map(range, mesh)):
                strips = strips_of(shape, placements, mesh, coordinate)
                check(func, args, dtype, shape, strips)


@settings(max_examples=60)
@given(
    st.sampled_from(OPERATORS[:5]),
    st.sampled_from(DTYPES),
    st.integers(1, 4000),
    st.lists(st.floats(0, 1), min_size=1, max_size=3),
    st.sampled_from([64, 256, 1 << 16]),
    st.booleans(),
)
def test_any_cut_in_chunks_of_any_length(operator, dtype, numel, cuts, chunk, contiguous):
    bounds = sorted({0, numel, *(int(cut * numel) for cut in cuts)})
    units = [end - start for start, end in itertools.pairwise(bounds)]
    placement = RaggedShard((0,), units)
    saved = cpu.CHUNK, cpu.LONG
    cpu.CHUNK, cpu.LONG = chunk, 2 * chunk // 3
    try:
        for rank in range(len(units)):
            strips = strips_of((numel,), [placement], (len(units),), (rank,))
            check(*operator, dtype, (numel,), strips, contiguous)
    finally:
        cpu.CHUNK, cpu.LONG = saved


def test_long_gaps_are_jumped_over(monkeypatch):
    jumps = []
    seek = mt19937.seek
    monkeypatch.setattr(mt19937, "pays", lambda words: words > 2000)
    monkeypatch.setattr(mt19937, "seek", lambda g, words: (jumps.append(words), seek(g, words)))
    for func, args in OPERATORS:
        for dtype in DTYPES:
            for rank in range(3):
                strips = strips_of((30, 999), [Shard(0)], (3,), (rank,))
                check(func, args, dtype, (30, 999), strips)
    assert len(jumps) == 4 * 3 * (len(OPERATORS) - 1)  # a log-normal sample may wait in the state


def test_what_cannot_be_split_is_drawn_as_a_whole(monkeypatch):
    """As where torch draws through a library with streams of its own."""
    monkeypatch.setattr(cpu, "_words_per_element", lambda *_: None)
    for rank in range(3):
        strips = strips_of((7, 5), [Shard(1)], (3,), (rank,))
        check(aten.bernoulli_.float, (0.3,), torch.float32, (7, 5), strips)
    monkeypatch.undo()
    strips = strips_of((7, 5), [Shard(1)], (2,), (1,))
    check(aten.normal_.default, (), torch.complex64, (7, 5), strips)


def test_wrong_arguments_raise_what_the_operator_raises():
    with pytest.raises(RuntimeError, match="std >= 0"):
        cpu.fill_part(aten.normal_.default, (0.0, -1.0), 5, [], torch.empty(0), None)
