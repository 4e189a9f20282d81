# SPDX-License-Identifier: Apache-2.0
"""Operations that would communicate to reshard raise, unless the environment allows it."""

import pytest
import torch

from vescale.legacy.dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    init_device_mesh,
    no_implicit_resharding,
    redistribute_dtensor,
)


@pytest.fixture
def mesh(fake_world):
    fake_world(0, 4)
    return init_device_mesh("cpu", (4,))


def test_what_would_communicate_raises(mesh):
    row = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)])
    column = DTensor.from_local(torch.ones(8, 2), mesh, [Shard(1)])
    terms = DTensor.from_local(torch.ones(8, 8), mesh, [Partial()])
    with no_implicit_resharding():
        assert (terms + terms).placements == (terms * 2).placements == (Partial(),)
        assert (redistribute_dtensor(row, mesh, [Shard(1)]) + column).placements == (Shard(1),)
        assert (row + redistribute_dtensor(column, mesh, [Replicate()])).placements == (Shard(0),)
    for operation in (lambda: row + column, lambda: torch.relu(terms), lambda: terms * terms):
        with pytest.raises(RuntimeError, match="implicit resharding"), no_implicit_resharding():
            operation()


def test_other_errors_pass_as_they_are(mesh):
    x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="got mixed"), no_implicit_resharding():
        x + torch.ones(8)
    with pytest.raises(KeyError), no_implicit_resharding():
        raise KeyError("x")


def test_the_environment_allows_it(mesh, monkeypatch):
    monkeypatch.setenv("VESCALE_DISABLE_REDISTRIBUTE", "0")
    terms = DTensor.from_local(torch.ones(8, 8), mesh, [Partial()])
    with no_implicit_resharding():
        assert torch.relu(terms).shape == (8, 8)
