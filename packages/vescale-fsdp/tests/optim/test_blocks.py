# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale.fsdp.optim.blocks import block_pieces, row_blocks
from vescale.fsdp.optim.roots import Matrix


@st.composite
def cut_blocks(draw):
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    shape = (sum(counts), draw(st.integers(1, 5)))
    if draw(st.booleans()):
        shape = (draw(st.integers(1, 3)), *shape)
    blocks = row_blocks(shape, lambda fqn, shape: counts, "w")
    numel, ranks = math.prod(shape), draw(st.integers(1, 4))
    edges = draw(st.lists(st.integers(0, numel), min_size=ranks - 1, max_size=ranks - 1))
    edges = [0, *sorted(edges), numel]
    return blocks, numel, [(b - a, 1) for a, b in itertools.pairwise(edges)]


@given(cut_blocks())
def test_pieces_cover_every_block_and_every_part(case):
    blocks, numel, runs = case
    pieces = block_pieces(blocks, runs)
    held = [0] * len(runs)
    for block, mine in zip(blocks, pieces, strict=True):
        Matrix(*block.shape, mine)  # raises unless the pieces are in order, once and complete
        for piece in mine:
            begin = sum(n for n, _ in runs[: piece.rank])
            assert begin <= block.start + piece.start
            assert block.start + piece.start + piece.numel <= begin + runs[piece.rank][0]
            held[piece.rank] += piece.numel
    assert held == [n for n, _ in runs]
    assert sum(block.numel for block in blocks) == numel


def test_experts_are_matrices_and_split_alike():
    assert [b.shape for b in row_blocks((3, 4, 5), None, None)] == [(4, 5)] * 3
    blocks = row_blocks((2, 4, 5), lambda fqn, shape: [3, 1] if fqn == "w" else None, "w")
    assert [(b.expert, b.first, b.rows, b.start) for b in blocks] == [
        (0, 0, 3, 0), (0, 3, 1, 15), (1, 0, 3, 20), (1, 3, 1, 35),
    ]  # fmt: skip
    assert len(row_blocks((4, 5), lambda fqn, shape: None, "w")) == 1


@pytest.mark.parametrize("counts", [[3], [5, -1], [2, 2.0], []])
def test_counts_must_add_up(counts):
    with pytest.raises(ValueError, match=r"'w' has shape \(4, 5\).*add up to 4"):
        row_blocks((4, 5), lambda fqn, shape: counts, "w")
