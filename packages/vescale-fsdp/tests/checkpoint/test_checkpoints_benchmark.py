# SPDX-License-Identifier: Apache-2.0
import pytest
from benchmarks.checkpoints import SHAPES, measure

from testing.ranks import DEVICE


def check_benchmark(rank, world_size, path):
    rows = measure(SHAPES["tiny"], rounds=1, folder=path, bucket_bytes=1 << 13)
    found = {(row.thing, row.way): row for row in rows}
    assert len(found) == len(rows) == 17
    assert all(row.ratio > 0 for row in rows)
    whole = found["weights out", "ours, whole on every rank"]
    assert found["weights out", "ours, streamed"].peak < whole.peak


@pytest.mark.skipif(DEVICE != "cpu", reason="the benchmark is for CPUs and gloo")
def test_the_benchmark_runs(run_ranks, tmp_path):
    run_ranks(check_benchmark, 2, tmp_path, exact=True)
