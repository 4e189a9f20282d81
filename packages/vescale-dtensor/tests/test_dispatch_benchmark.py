# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from benchmarks.dispatch import KINDS, OPERATIONS, TARGETS, Row, measure, table

from vescale.dtensor import init_device_mesh, random


def test_the_benchmark_measures_every_kind(fake_group):
    fake_group(4, rank=1)
    mesh = init_device_mesh("cpu", (4,))
    rows = [measure(name, mesh, repeats=1) for name in ("add", "AdamW fused")]
    assert all(set(row.micros) == set(KINDS) and min(row.micros.values()) > 0 for row in rows)
    (norm,) = (measure(name, mesh, repeats=1) for name in ("layer_norm, replicated",))
    assert set(norm.micros) == set(KINDS) - {"ragged"}
    assert len(table([*rows, norm]).splitlines()) == 4
    assert random.get_mode() == "off"
    assert torch.is_grad_enabled()


def test_every_operation_has_targets():
    assert set(TARGETS) == set(OPERATIONS)


@pytest.mark.parametrize(("ragged", "missed"), [(5.0, []), (10.5, []), (12.0, ["ragged"])])
def test_a_missed_target_is_named(ragged, missed):
    row = Row("AdamW foreach", dict.fromkeys(KINDS, 10.0) | {"ragged": ragged})
    assert row.missed(0.1) == missed
    assert ("MISSED" in table([row], 0.1)) == bool(missed)
