# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of every kind of signature are placed as list and dict plans say."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.legacy.dmodule import PlacementsInterface, parallelize_module
from vescale.legacy.dtensor import Replicate, Shard, init_device_mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    name: str = "out"


class Fields(OrderedDict):
    """As the ModelOutput of transformers: a dict that is made of keywords."""

    def __init__(self, **fields):
        super().__init__(fields)


def t():
    return torch.ones(2, 2)


def seen(tree):
    """Return placements in the place of tensors: None for a plain one."""
    if isinstance(tree, torch.Tensor):
        return tree.placements[0] if isinstance(tree, DTensor) else None
    if isinstance(tree, dict):
        return {key: seen(value) for key, value in tree.items()}
    return [seen(value) for value in tree] if isinstance(tree, list | tuple) else tree


def build(forward, plan, fake_world):
    fake_world(0, 2)
    module = type("Module", (nn.Module,), {"forward": forward})()
    return parallelize_module(module, init_device_mesh("cpu", (2,)), {"forward": plan})


def no_arguments(self):
    return []


def plain(self, a, b):
    return [a, b]


def defaults(self, a, b=1, c=None):
    return [a, b, c]


def keyword_only(self, a, *, c, d=2):
    return [a, c, d]


def positional(self, a, *args):
    return [a, *args]


def keywords(self, a, **kwargs):
    return [a, kwargs]


def mixed(self, a, b=1, *args, c, d=2, **kwargs):
    return [a, b, list(args), c, d, kwargs]


CASES = [
    (no_arguments, (), {}, [], []),
    (plain, (t(), t()), {}, [[R], [S0]], [R, S0]),
    (plain, (t(),), {"b": t()}, [[R], [S0]], [R, S0]),
    (plain, (t(), t()), {}, [[R]], [R, None]),
    (plain, (t(), t()), {}, [None, [S1]], [None, S1]),
    (plain, (t(), 3), {}, [[R], [S1]], [R, 3]),
    (plain, (t(), None), {}, [[R], [S1]], [R, None]),
    (plain, ([t(), t()], t()), {}, [[[R], [S0]], [S1]], [[R, S0], S1]),
    (defaults, (t(),), {}, [[R], [S0], [S0]], [R, 1, None]),
    (defaults, (t(),), {"c": t()}, [[R], [S0], [S1]], [R, 1, S1]),
    (keyword_only, (t(),), {"c": t()}, [[R], [S0]], [R, S0, 2]),
    (positional, (t(), t(), t()), {}, [[R], [S0], [S1]], [R, S0, S1]),
    (positional, (t(),), {}, [[R]], [R]),
    (keywords, (t(),), {"x": t()}, [[R]], [R, {"x": None}]),
    (mixed, (t(), t(), t()), {"c": t()}, [[R], [S0], [S1], [S0]], [R, S0, [S1], S0, 2, {}]),
    (plain, (t(), t()), {}, {"a": [R], "b": [S0]}, [R, S0]),
    (plain, (t(), t()), {}, {"b": [S0]}, [None, S0]),
    (plain, ([t()], {"k": t()}), {}, {"a": [[S1]], "b": {"k": [S0]}}, [[S1], {"k": S0}]),
    (defaults, (t(),), {}, {"a": [R], "b": [R], "c": [R]}, [R, 1, None]),
    (keyword_only, (t(),), {"c": t(), "d": t()}, {"c": [S0], "d": None}, [None, S0, None]),
    (positional, (t(), t(), t()), {}, {"args": [[S0], [S1]]}, [None, S0, S1]),
    (positional, (t(), t(), t()), {}, {"args": [[S0]]}, [None, S0, None]),
    (keywords, (t(),), {"x": t(), "y": t()}, {"x": [S0]}, [None, {"x": S0, "y": None}]),
    (
        mixed,
        (t(), t(), t()),
        {"c": t(), "x": t()},
        {"a": [R], "args": [[S1]], "c": [S0], "x": [R]},
        [R, None, [S1], S0, 2, {"x": R}],
    ),
    (plain, (t(), t()), {}, [PlacementsInterface([S0], run_check=False), None], [S0, None]),
]


@pytest.mark.parametrize(("forward", "args", "kwargs", "plan", "expected"), CASES)
def test_arguments(fake_world, forward, args, kwargs, plan, expected):
    module = build(forward, {"input": plan}, fake_world)
    assert seen(module(*args, **kwargs)) == expected


@pytest.mark.parametrize("plan", [[[R], [R], [R]], {"a": [R], "z": [R]}])
def test_more_than_there_is_warns(fake_world, plan):
    module = build(plain, {"input": plan}, fake_world)
    with pytest.warns(UserWarning, match="ignored"):
        module(t(), t())


@pytest.mark.parametrize(
    ("make", "plan", "expected"),
    [
        (lambda: t(), [[S0]], S0),
        (lambda: t(), [S0], S0),
        (lambda: t(), PlacementsInterface([S0]), S0),
        (lambda: None, [[S0]], None),
        (lambda: (t(), t()), [[S0], None], [S0, None]),
        (lambda: [t(), None], [[S0], [R]], [S0, None]),
        (lambda: Pair(t(), t()), [[S0], [S1]], [S0, S1]),
        (lambda: {"a": t(), "b": 3}, {"a": [S0]}, {"a": S0, "b": 3}),
        (lambda: Fields(a=t(), b=None), {"a": [S0], "b": [R]}, {"a": S0, "b": None}),
    ],
)
def test_results_keep_their_type(fake_world, make, plan, expected):
    module = build(lambda self: make(), {"output": plan}, fake_world)
    out = module()
    assert seen(out) == expected
    assert type(out) is type(make()) or isinstance(out, DTensor)


def test_a_dataclass_keeps_its_type_and_other_fields(fake_world):
    module = build(lambda self: Output(t(), t()), {"output": {"logits": [S0]}}, fake_world)
    out = module()
    assert isinstance(out, Output)
    assert (seen(out.logits), seen(out.loss), out.name) == (S0, None, "out")


@pytest.mark.parametrize(
    ("make", "plan", "error", "text"),
    [
        (lambda: 3, [[S0]], RuntimeError, "places a int"),
        (lambda: (t(), t()), [[S0]], AssertionError, "1 entries in the plan for 2 values"),
        (lambda: {"a": t()}, [[S0]], ValueError, "wants a dict plan"),
    ],
)
def test_a_plan_that_does_not_fit_the_result_is_refused(fake_world, make, plan, error, text):
    module = build(lambda self: make(), {"output": plan}, fake_world)
    with pytest.raises(error, match=text):
        module()


def test_a_dict_plan_of_a_tuple_has_no_effect_and_says_so(fake_world):
    module = build(lambda self: (t(), t()), {"output": {"a": [S0]}}, fake_world)
    with pytest.warns(UserWarning, match="no effect"):
        assert seen(module()) == [None, None]
