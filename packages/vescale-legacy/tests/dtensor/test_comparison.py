# SPDX-License-Identifier: Apache-2.0
"""Equal means equal metadata and equal local data."""

import pytest
import torch

from vescale.legacy.dtensor import DTensor, Replicate, Shard, allclose, equal, init_device_mesh


@pytest.fixture
def mesh(fake_world):
    fake_world(0, 2)
    return init_device_mesh("cpu", (2,))


def make(local, mesh, placement=None):
    return DTensor.from_local(local, mesh, [placement or Shard(0)])


def test_values_and_metadata_count(mesh):
    x = make(torch.ones(2, 3), mesh)
    assert equal(x, make(torch.ones(2, 3), mesh))
    assert not equal(x, make(torch.zeros(2, 3), mesh))
    assert not equal(x, make(torch.ones(2, 3, dtype=torch.float64), mesh))
    assert not equal(x, make(torch.ones(2, 3), mesh, Replicate()))
    assert not equal(x, make(torch.ones(2, 3).requires_grad_(), mesh))
    assert not equal(x, make(torch.ones(3, 2).t(), mesh))
    with pytest.raises(TypeError, match="two DTensors"):
        equal(x, torch.ones(2, 3))


def test_close_values(mesh):
    x, y = make(torch.ones(2), mesh), make(torch.ones(2) + 1e-6, mesh)
    assert not equal(x, y)
    assert allclose(x, y)
    assert not allclose(x, y, rtol=0, atol=1e-9)
    nan = make(torch.full((2,), torch.nan), mesh)
    assert not allclose(nan, nan)
    assert allclose(nan, nan, equal_nan=True)


def test_meta_tensors_are_equal_by_metadata(fake_world):
    fake_world(0, 2)
    mesh = init_device_mesh("meta", (2,))
    x = make(torch.ones(2, device="meta"), mesh)
    assert equal(x, make(torch.zeros(2, device="meta"), mesh))
    assert allclose(x, x)
