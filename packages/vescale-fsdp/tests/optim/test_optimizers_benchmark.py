# SPDX-License-Identifier: Apache-2.0
import pytest
from benchmarks.optimizers import measure, table

from testing.ranks import DEVICE


def check_benchmark(rank, world_size):
    rows = {row.name: row for row in measure(width=64, layers=1, steps=2)}
    sent = {name: row.bytes_per_param for name, row in rows.items()}
    state = {name: row.state_bytes_per_param for name, row in rows.items()}
    assert sent["AdamW"] == sent["AdamW8bit"] == 0
    assert 0 < sent["Muon"] < sent["Muon, full tensors"] < sent["torch Muon on FSDP2"]
    assert state["AdamW8bit"] < 0.3 * state["AdamW"]
    assert state["Muon"] < state["Muon, full tensors"]
    assert rows["Muon"].losses == rows["Muon, full tensors"].losses
    assert table(list(rows.values())).count("\n") == len(rows)


@pytest.mark.skipif(DEVICE != "cpu", reason="the benchmark counts, and counts alike on a CPU")
def test_the_benchmark_shows_what_it_promises(run_ranks):
    run_ranks(check_benchmark, 2)
