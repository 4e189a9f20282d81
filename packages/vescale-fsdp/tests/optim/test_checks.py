# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the optimizers are refused at the call, without a process group."""

import pytest
import torch
from torch import nn

from vescale.fsdp.optim import SOAP, AdamW8bit, Muon, split_params

ALL = (Muon, AdamW8bit, SOAP)


def params():
    return [nn.Parameter(torch.zeros(4, 4))]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))])
def test_a_module_is_refused_with_what_to_pass(kind, model):
    remedy = r"model\.named_parameters" if kind is AdamW8bit else r"split_params\(model\)"
    match = rf"{kind.__name__} got a module .*expected its parameters; pass .*{remedy}"
    with pytest.raises(TypeError, match=match):
        kind(model)


@pytest.mark.parametrize("kind", ALL)
def test_a_parameter_without_memory_is_refused(kind):
    with pytest.raises(ValueError, match=r"is on the meta device.* call vescale.fsdp.init_empty"):
        kind([nn.Parameter(torch.zeros(4, 4, device="meta"))])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("given", [3, "weight", None])
def test_what_is_no_parameters_is_refused(kind, given):
    with pytest.raises(TypeError, match=rf"{kind.__name__} got {given!r}, a .*, expected param"):
        kind(given)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("x", TypeError, r"'x' is a str, expected a number >= 0, such as"),
        (None, TypeError, r"None is a NoneType, expected a number"),
        ([0.1], TypeError, r"\[0.1\] is a list"),
        (-1.0, ValueError, r"-1.0, expected a number >= 0"),
        (float("nan"), ValueError, "nan, expected a number >= 0"),
    ],
)
def test_what_is_no_number_is_refused(kind, value, error, message):
    for name in ("lr", "weight_decay"):
        with pytest.raises(error, match=f"{name}={message}"):
            kind(params(), **{name: value})
    optimizer = kind(params())
    with pytest.raises(error, match=f"lr={message}"):
        optimizer.add_param_group({"params": params(), "lr": value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [AdamW8bit, SOAP])
@pytest.mark.parametrize(
    ("betas", "error", "message"),
    [
        (3, TypeError, "betas=3 is a int, expected two numbers"),
        ("ab", TypeError, "betas='ab' is a str"),
        ((0.9, "x"), TypeError, "is a tuple, expected two numbers"),
        ((0.9,), ValueError, r"betas=\(0.9,\), expected two numbers in \[0, 1\); pass for example"),
        ((0.9, 1.0), ValueError, "expected two numbers"),
    ],
)
def test_betas_are_two_numbers(kind, betas, error, message):
    with pytest.raises(error, match=message):
        kind(params(), betas=betas)


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (SOAP, {"shampoo_beta": "x"}, TypeError, "shampoo_beta='x' is a str"),
        (SOAP, {"shampoo_beta": 1.0}, ValueError, r"shampoo_beta=1.0, expected .*, or None"),
        (SOAP, {"precondition_frequency": 0.5}, TypeError, "frequency=0.5 is a float, expected an"),
        (SOAP, {"precondition_frequency": 0}, ValueError, "frequency=0, expected at least 1"),
        (SOAP, {"block_size": "x"}, TypeError, "block_size='x' is a str, expected an integer"),
        (SOAP, {"max_inflight_bytes": True}, TypeError, "max_inflight_bytes=True is a bool"),
        (Muon, {"max_inflight_bytes": None}, TypeError, "max_inflight_bytes=None is a NoneType"),
        (Muon, {"momentum": "x"}, TypeError, "momentum='x' is a str"),
        (Muon, {"ns_steps": 2.5}, TypeError, "ns_steps=2.5 is a float, expected an integer"),
        (Muon, {"nesterov": 3}, TypeError, "nesterov=3 is a int; pass True or False"),
        (Muon, {"eps": "x"}, TypeError, "eps='x' is a str, expected a number"),
        (Muon, {"ns_fn": 3}, TypeError, r"ns_fn=3 is a int, expected a function \(matrix, ns_c"),
        (Muon, {"matrix_split": 3}, TypeError, r"matrix_split=3 .* a function \(fqn, shape\), or"),
        (SOAP, {"kl": 1}, TypeError, "kl=1 is a int; pass True or False"),
        (AdamW8bit, {"seed": "x"}, TypeError, "seed='x' is a str, expected an integer"),
        (AdamW8bit, {"stochastic_round": 1}, TypeError, "stochastic_round=1 is a int; pass True"),
        (Muon, {"ns_coefficients": 3}, ValueError, r"ns_coefficients=3, expected three numbers"),
    ],
)
def test_options_of_their_own_are_checked(kind, options, error, message):
    with pytest.raises(error, match=message):
        kind(params(), **options)


@pytest.mark.parametrize("kind", ALL)
def test_groups_are_dicts_with_parameters(kind):
    optimizer = kind(params())
    for wrong in (3, [], {"lr": 0.1}):
        with pytest.raises(TypeError, match=r"add_param_group got .*a dict with the key 'params'"):
            optimizer.add_param_group(wrong)
    with pytest.raises(TypeError, match="got a module"):
        optimizer.add_param_group({"params": nn.Linear(4, 4)})
    with pytest.raises(TypeError, match="got a module"):
        kind([{"params": nn.Linear(4, 4)}])


@pytest.mark.parametrize("kind", ALL)
def test_numbers_may_be_tensors_of_one_element(kind):
    kind(params(), lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match="lr is a tensor of 2 elements, expected 1"):
        kind(params(), lr=torch.ones(2))


@pytest.mark.parametrize("given", [3, None])
def test_what_cannot_be_split_is_refused(given):
    with pytest.raises(TypeError, match=r"split_params got a .*, expected a module or .*pass the"):
        split_params(given)


@pytest.mark.parametrize("pair", [("a", 3), (3, nn.Parameter(torch.ones(2))), ("a",), (1, 2, 3)])
def test_pairs_are_of_name_and_parameter(pair):
    with pytest.raises(
        TypeError, match=r"split_params got a tuple of \(\w.*\), expected a module or"
    ):
        split_params([pair])


def test_a_predicate_is_a_function():
    with pytest.raises(TypeError, match=r"predicate=3 is a int, expected a function \(fqn, param"):
        split_params(nn.Linear(4, 4), predicate=3)
