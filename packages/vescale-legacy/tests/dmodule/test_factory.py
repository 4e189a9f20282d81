# SPDX-License-Identifier: Apache-2.0
"""Constructors inside forward return DTensors where the factory argument says."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.legacy.dmodule import PlacementsInterface, parallelize_module
from vescale.legacy.dmodule._factory import (
    FactoryDispatchModeOff,
    FactoryDispatchModeOn,
    _provide_args,
)
from vescale.legacy.dtensor import Replicate, Shard, init_device_mesh

R, S0 = Replicate(), Shard(0)


class Inner(nn.Module):
    def forward(self):
        return torch.zeros(4), torch.arange(4)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self):
        made = torch.ones(4, 2), torch.empty((4,)), torch.full((4,), 2.0, device="cpu")
        return *made, *self.inner(), torch.zeros(size=(4,), dtype=torch.int32)


@pytest.fixture
def mesh(fake_world):
    fake_world(0, 2)
    return init_device_mesh("cpu", (2,))


def kinds(tensors):
    return [x.placements[0] if isinstance(x, DTensor) else None for x in tensors]


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (False, [None] * 6),
        (True, [R] * 6),
        ({Inner: True}, [None, None, None, R, R, None]),
        ({Outer: True, Inner: False}, [R, R, R, None, None, R]),
        ({Outer: True, Inner: {torch.zeros: [S0]}}, [R, R, R, S0, None, R]),
        ({Outer: {torch.zeros: PlacementsInterface([S0])}}, [None, None, None, S0, None, S0]),
    ],
)
def test_modules_by_class(mesh, factory, expected):
    model = parallelize_module(Outer(), mesh, factory=factory)
    made = model()
    assert kinds(made) == expected
    assert [x.shape for x in made] == [(4, 2), (4,), (4,), (4,), (4,), (4,)]
    assert made[-1].dtype == torch.int32
    assert kinds([torch.zeros(2)]) == [None]


def test_modes_nest_and_the_innermost_wins(mesh):
    table = _provide_args(mesh, {torch.zeros: [S0]})
    with FactoryDispatchModeOn(mesh, table):
        assert kinds([torch.zeros(4), torch.ones(4)]) == [S0, None]
        with FactoryDispatchModeOff():
            assert kinds([torch.zeros(4)]) == [None]
            with FactoryDispatchModeOn(mesh, _provide_args(mesh, {torch.zeros: None})):
                assert kinds([torch.zeros(4)]) == [R]
            assert kinds([torch.zeros(4)]) == [None]
        assert kinds([torch.zeros(4)]) == [S0]
        with pytest.raises(AssertionError, match="leave it out"):
            torch.zeros(4, out=torch.empty_like(torch.ones(4)))
    assert kinds([torch.zeros(4)]) == [None]


def test_other_constructors_are_refused(mesh):
    with pytest.raises(ValueError, match="factory mode has no 'eye'"):
        _provide_args(mesh, {torch.eye: [R]})
