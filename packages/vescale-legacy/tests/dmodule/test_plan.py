# SPDX-License-Identifier: Apache-2.0
"""Patterns find names; what cannot be meant is refused."""

import pytest
from torch import nn

from vescale.legacy.dmodule.placements_interface import PlacementsInterface as PI
from vescale.legacy.dmodule.plan import check_plan, resolve_forward, resolve_parameters
from vescale.legacy.dtensor import Partial, Replicate, Shard

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def model():
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    return nn.ModuleDict({"layers": layers, "head": nn.Linear(4, 2, bias=False)})


def placements(found):
    return {name: entry.placements for name, entry in found.items()}


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("head.weight", ["head.weight"]),
        (r"layers\.\d+.weight", ["layers.0.weight", "layers.1.weight", "layers.2.weight"]),
        (r"layers\.(0|2)\.bias", ["layers.0.bias", "layers.2.bias"]),
        ("layers.1.running_mean", ["layers.1.running_mean"]),
        ("weight", []),  # of the root
        ("layer.weight", []),
        ("head.weight_g", []),
    ],
)
def test_keys_match_whole_names(key, names):
    found = resolve_parameters(model(), {key: [S0]}, 1)
    assert placements(found) == dict.fromkeys(names, (S0,))


def test_values_take_all_forms():
    plan = {
        "head.weight": PI([Shard(-1)], async_op=False),
        "layers.0.weight": None,
        "layers.0.bias": [S0],
    }
    with pytest.warns(UserWarning, match="taken as Replicate"):
        found = resolve_parameters(model(), plan, 2)
    assert placements(found) == {
        "head.weight": (S1, R),
        "layers.0.weight": (R, R),
        "layers.0.bias": (S0, R),
    }
    assert found["head.weight"].async_op is False
    assert plan["head.weight"].placements == [Shard(-1)]  # the user's plan stays as it was


def test_the_last_of_several_keys_wins():
    with pytest.warns(UserWarning, match="2 keys of the plan match layers.0.weight"):
        found = resolve_parameters(model(), {r"layers\.0.weight": [S0], "layers.0.weight": [S1]}, 1)
    assert placements(found) == {"layers.0.weight": (S1,)}


def test_forward_entries():
    plan = {
        "input": [[R], None],
        ".output": {"x": [S0], "y": [[S1], PI([R], grad=[Partial()])]},
        r"layers\.\d+.input": [[S0]],
        "head.weight": [R],
    }
    found = resolve_forward(model(), plan, 1)
    assert found["input"] == [PI((R,)), None]
    assert found["output"] == {"x": PI((S0,)), "y": [PI((S1,)), PI((R,), grad=(Partial(),))]}
    assert found["layers.2.input"] == [PI((S0,))]
    assert found["head.weight"] == PI((R,))
    with pytest.raises(ValueError, match=r"head\.bais is no parameter"):
        resolve_forward(model(), {"head.bais": [R]}, 1)
    with pytest.raises(NotImplementedError, match="a dict inside a list"):
        resolve_forward(model(), {"head.input": [{"x": [R]}]}, 1)
    with pytest.raises(ValueError, match="no placements"):
        resolve_forward(model(), {"head.input": [3]}, 1)


def test_other_parts_of_a_plan_are_refused():
    assert check_plan(None) == check_plan({"forward": None}) == ({}, {})
    with pytest.raises(KeyError, match="did you mean 'parameter'"):
        check_plan({"params": {}})


def test_the_interface_knows_what_it_says():
    assert PI().is_none()
    assert PI([R]).is_placements()
    assert not PI([R], async_op=False).is_placements()
    entry = PI.from_placements([S0])
    assert PI.from_placements(entry) is entry
    entry.normalize_placements(1, tensor_ndim=2)
    assert entry.placements == (S0,)
