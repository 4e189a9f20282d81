# SPDX-License-Identifier: Apache-2.0
import pytest
from benchmarks.muon import layer_shapes, measure

from testing.ranks import DEVICE


def check_benchmark(rank, world_size):
    stock, *ours = measure(layers=1, width=32)
    assert [row.collectives for row in ours] == [3, 3, 3, 0]
    assert all(row.flop_ratio == 1.0 for row in ours)
    assert all(row.equal == 7 and row.largest_error == 0 for row in ours)
    assert stock.collectives > 7 * 10
    assert stock.bytes_per_param > 10 * ours[0].bytes_per_param
    # Twice the elements' bytes, but the same flags: one byte for each parameter and pair of ranks.
    flags = 7 * 2 / sum(rows * cols for rows, cols in layer_shapes(32))
    assert 2 * ours[2].bytes_per_param - ours[1].bytes_per_param == pytest.approx(flags)


@pytest.mark.skipif(DEVICE != "cpu", reason="the benchmark counts, and counts alike on a CPU")
def test_the_benchmark_shows_what_it_promises(run_ranks):
    run_ranks(check_benchmark, 2, exact=True)
