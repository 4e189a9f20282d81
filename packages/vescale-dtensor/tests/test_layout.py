# SPDX-License-Identifier: Apache-2.0
import copy
import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale.dtensor.layout import (
    boxes_of_range,
    chunk_lengths,
    chunk_numels,
    chunk_runs,
    contiguous_stride,
    exchange_counts,
    make_layout,
    pieces_by_chunk,
    sharded_block,
)
from vescale.dtensor.placement import RaggedShard

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def shapes_and_ranges(draw):
    shape = draw(shapes)
    ends = st.integers(0, math.prod(shape))
    return shape, *sorted((draw(ends), draw(ends)))


@given(shapes_and_ranges())
def test_boxes_tile_a_flat_range_exactly_once_in_storage_order(case):
    shape, start, end = case
    boxes = list(boxes_of_range(start, end, shape))
    flat = torch.arange(math.prod(shape)).view(shape)
    covered, position = [], 0
    for box in boxes:
        assert box.start == position
        place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
        covered += flat[place].reshape(-1).tolist()
        position += box.numel
    assert covered == list(range(start, end))
    assert len(boxes) <= 2 * len(shape) - 1
    assert len({box.offset for box in boxes}) == len(boxes)


def test_boxes_of_scalars_and_empty_tensors():
    assert [(b.offset, b.shape) for b in boxes_of_range(0, 1, ())] == [((), ())]
    assert list(boxes_of_range(0, 0, ())) == []
    assert list(boxes_of_range(0, 0, (0, 4))) == []


@st.composite
def two_cuts(draw):
    world_size = draw(st.integers(1, 6))
    numel = draw(st.integers(0, 40))
    ends = st.lists(st.integers(0, numel), min_size=world_size - 1, max_size=world_size - 1)

    def cut():
        edges = [0, *sorted(draw(ends)), numel]
        return [b - a for a, b in itertools.pairwise(edges)]

    return cut(), cut()


@given(two_cuts())
def test_exchange_counts_agree_between_ranks_and_keep_the_order(cuts):
    source, target = cuts
    ranks = range(len(source))
    counts = [exchange_counts(source, target, rank) for rank in ranks]
    for sender, receiver in itertools.product(ranks, ranks):
        assert counts[sender][0][receiver] == counts[receiver][1][sender]
    for rank in ranks:
        assert sum(counts[rank][0]) == source[rank]
        assert sum(counts[rank][1]) == target[rank]
    # Play the exchange: every rank must end with its contiguous part.
    flat = list(range(sum(source)))
    parts = [flat[sum(source[:rank]) : sum(source[: rank + 1])] for rank in ranks]
    received = [[] for _ in ranks]
    for sender in ranks:
        rest = parts[sender]
        for receiver in ranks:
            numel = counts[sender][0][receiver]
            received[receiver] += rest[:numel]
            rest = rest[numel:]
    assert received == [flat[sum(target[:rank]) : sum(target[: rank + 1])] for rank in ranks]


@st.composite
def layouts(draw):
    k, units = draw(st.integers(1, 2)), draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    units = units if any(units) else [*units[1:], 1]
    inner = draw(st.lists(st.integers(0, 3), max_size=2))
    rows = [sum(units) * draw(st.integers(0, 3)), *([draw(st.integers(1, 3))] * (k - 1))]
    return RaggedShard(range(k), units), tuple(rows + inner)


@given(layouts())
def test_the_parts_of_all_ranks_follow_each_other_and_cover_the_tensor(case):
    ragged, shape = case
    parts = [
        make_layout(ragged, 0, shape, (0,) * len(shape), r) for r in range(len(ragged.local_units))
    ]
    assert parts[0].start == 0
    assert parts[-1].end == math.prod(shape)
    assert all(a.end == b.start for a, b in itertools.pairwise(parts))
    assert tuple(part.numel for part in parts) == parts[0].split_numels
    for part in parts:
        assert math.prod(part.block_shape) == part.numel
        assert part.block_shape[1:] == shape[len(ragged.dims) :]
        assert sum(box.numel for box in part.boxes) == part.numel


def test_a_layout_is_made_once_and_copied_never():
    ragged = RaggedShard((0,), (1, 1))
    layout = make_layout(ragged, 0, (4,), (0,), 1)
    assert make_layout(RaggedShard((0,), (1, 1)), 0, (4,), (0,), 1) is layout
    assert copy.deepcopy(layout) is copy.copy(layout) is layout


def test_a_whole_tensor_has_its_shape_on_its_owner_and_no_rows_elsewhere():
    owner, other = (make_layout(RaggedShard((), (1, 0)), 0, (2, 3), (0, 0), r) for r in range(2))
    assert (owner.block_shape, other.block_shape) == ((2, 3), (0, 3))
    owner, other = (make_layout(RaggedShard((), (1, 0)), 0, (), (), r) for r in range(2))
    assert (owner.block_shape, other.block_shape) == ((), (0,))


def test_boxes_count_from_the_whole_tensor():
    layout = make_layout(RaggedShard((0,), (1, 1)), 0, (2, 3), (4, 6), 1)
    assert [(box.offset, box.shape) for box in layout.boxes] == [((5, 6), (1, 3))]


@given(shapes_and_ranges(), st.data())
def test_pieces_cut_boxes_at_the_chunks_and_keep_the_order_of_each_chunk(case, data):
    shape, start, end = case
    dim, world_size = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
    flat = torch.arange(math.prod(shape))
    part, boxes = flat[start:end], list(boxes_of_range(start, end, shape))
    lengths = chunk_numels(shape[dim], world_size)
    chunks = flat.view(shape).split(lengths, dim)
    for chunk, pieces in zip(chunks, pieces_by_chunk(boxes, dim, lengths), strict=True):
        found = []
        for box, first, length in pieces:
            whole = part[box.start : box.start + box.numel].view(box.shape)
            found += whole.narrow(dim, first, length).reshape(-1).tolist()
        assert found == [n for n in chunk.reshape(-1).tolist() if start <= n < end]


@given(st.integers(0, 30), st.integers(1, 7), st.integers(1, 3))
def test_chunk_numels_is_torch_chunk(length, world_size, row_numel):
    chunks = [len(c) for c in torch.arange(length).chunk(world_size)] if length else []
    chunks += [0] * (world_size - len(chunks))
    assert chunk_numels(length, world_size, row_numel) == tuple(n * row_numel for n in chunks)
    assert chunk_lengths(length, world_size) == set(chunks)
    assert len(chunk_runs(length, world_size, row_numel)) <= 3


@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 4), st.integers(1, 3))
def test_two_shards_of_one_dim_nest_from_left_to_right(shape, outer, inner):
    whole = torch.arange(math.prod(shape)).view(shape)
    for a, b in itertools.product(range(outer), range(inner)):
        block, offset = sharded_block(shape, [(0, outer, a), (0, inner, b)])
        first = [*whole.chunk(outer), *[whole[:0]] * outer][a]
        second = [*first.chunk(inner), *[first[:0]] * inner][b] if len(first) else first
        assert block == tuple(second.shape)
        assert offset[1] == 0
        assert torch.equal(whole[offset[0] : offset[0] + block[0]], second)


@given(shapes)
def test_contiguous_stride_is_torchs(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()
