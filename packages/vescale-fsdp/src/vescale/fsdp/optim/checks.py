# SPDX-License-Identifier: Apache-2.0
"""What the optimizers refuse, and how it names a parameter when it does."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.fsdp.arguments import check_bool
from vescale.fsdp.optim.cuts import read_cut
from vescale.fsdp.optim.newton_schulz import step_triples

MATRICES = "the first of the two lists that split_params(model) returns"
NAMED = "model.named_parameters()"
LR_RULES = (None, "original", "match_rms_adamw")


def label_of(group: Mapping[str, Any], group_index: int, index: int) -> str:
    """Return how errors name a parameter: by its FQN where the optimizer knows it."""
    if "param_names" in group:
        return f"parameter {group['param_names'][index]!r}"
    return f"parameter {index} of group {group_index}"


def check_given(params: Any, optimizer: str, advice: str) -> None:
    """Raise TypeError unless ``params`` may be the first argument of ``optimizer``.

    What it holds is for the base class to check. ``advice`` says what to pass for a module.
    """
    if isinstance(params, nn.Module):
        raise TypeError(
            f"{optimizer} got a module ({type(params).__name__}), expected its parameters; pass "
            f"{advice}."
        )
    if not isinstance(params, Iterable) or isinstance(params, str):
        raise TypeError(
            f"{optimizer} got {params!r}, a {type(params).__name__}, expected parameters, pairs of "
            f"name and parameter, or groups of them; pass {advice}."
        )


def check_group(group: Any, optimizer: str, advice: str) -> None:
    """Raise TypeError unless ``group`` may be added to ``optimizer``; see ``check_given``."""
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(
            f"{optimizer}.add_param_group got {group!r}, expected a dict with the key 'params'; "
            f"pass for example {{'params': ..., 'lr': 0.01}} with {advice}."
        )
    check_given(group["params"], optimizer, advice)


def check_number(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a number or a tensor of one, ValueError if negative."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} is a tensor of {value.numel()} elements, expected 1.")
    elif not isinstance(value, Real):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}, expected a number >= 0, such as 0.01."
        )
    if not value >= 0:
        raise ValueError(f"{name}={value}, expected a number >= 0.")


def check_integer(name: str, value: Any, least: int | None = None) -> None:
    """Raise TypeError unless ``value`` is an integer, ValueError if it is less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, expected an integer.")
    if least is not None and value < least:
        raise ValueError(f"{name}={value}, expected at least {least}.")


def check_function(name: str, value: Any, signature: str) -> None:
    """Raise TypeError unless ``value`` can be called, or is None; ``signature`` says how."""
    if value is not None and not callable(value):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}, expected a function {signature}, or "
            "None."
        )


def check_betas(betas: Any) -> None:
    """Raise TypeError unless ``betas`` are two numbers, ValueError unless they are in [0, 1)."""
    pair = isinstance(betas, Sequence) and all(isinstance(b, Real | torch.Tensor) for b in betas)
    if not pair:
        raise TypeError(
            f"betas={betas!r} is a {type(betas).__name__}, expected two numbers in [0, 1); pass "
            "for example (0.9, 0.95)."
        )
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"betas={betas}, expected two numbers in [0, 1); pass for example (0.9, 0.95)."
        )


def check_options(group: Mapping[str, Any]) -> None:
    for name in ("lr", "momentum", "weight_decay", "eps"):
        check_number(name, group[name])
    check_bool("nesterov", group["nesterov"])
    if group["adjust_lr_fn"] not in LR_RULES:
        raise ValueError(f"adjust_lr_fn={group['adjust_lr_fn']!r}, expected one of {LR_RULES}.")
    check_ns_options(group)


def check_ns_options(group: Mapping[str, Any]) -> None:
    """Raise here, on every rank, what Newton-Schulz would raise on a root only."""
    step_triples(group["ns_coefficients"], group["ns_steps"])


def check_params(group: Mapping[str, Any], group_index: int, optimizer: str) -> None:
    """Raise for what ``optimizer`` cannot take; the base class has refused what none can."""
    for index, param in enumerate(group["params"]):
        label = label_of(group, group_index, index)
        if param.ndim not in (2, 3):
            raise ValueError(
                f"{label} has shape {tuple(param.shape)}, but {optimizer} takes matrices, and "
                "experts [experts, rows, cols], only; give it to another optimizer, such as AdamW: "
                "split_params() tells which."
            )
        check_memory(param, label)
        if param.is_complex():
            raise ValueError(f"{label} is complex ({param.dtype}), expected a real dtype.")
        read_cut(param, label)  # raises for placements that are not known
    check_once(group, group_index)


def check_memory(param: torch.Tensor, label: str) -> None:
    """Raise for a parameter on the meta device, beside which no state can be made."""
    if param.is_meta:
        raise ValueError(
            f"{label} is on the meta device, and the state is made with the optimizer; call "
            "vescale.fsdp.init_empty(model, device), or load the model alone, first."
        )


def check_once(group: Mapping[str, Any], group_index: int) -> None:
    """Raise where a group lists a parameter twice."""
    if len(set(group["params"])) < len(group["params"]):
        raise ValueError(
            f"group {group_index} lists a parameter twice; it would be updated twice in each step."
        )


def check_grad(group: Mapping[str, Any], group_index: int, index: int) -> None:
    """Raise for a gradient that does not lie where its parameter lies."""
    param = group["params"][index]
    if param.grad is None:
        return
    if param.grad.is_sparse:
        label = label_of(group, group_index, index)
        raise ValueError(f"{label} has a sparse gradient; use sparse=False, or another optimizer.")
    check_same_layout(param.grad, "gradient", group, group_index, index)


def check_same_layout(
    tensor: torch.Tensor, what: str, group: Mapping[str, Any], group_index: int, index: int
) -> None:
    """Raise unless ``tensor`` has the shape, mesh and placements of parameter ``index``."""
    param = group["params"][index]
    if tensor.shape == param.shape and _placed(tensor) == _placed(param):
        return
    raise ValueError(
        f"{label_of(group, group_index, index)} has shape {tuple(param.shape)} and (mesh, "
        f"placements) {_placed(param)}, but its {what} has {tuple(tensor.shape)} and "
        f"{_placed(tensor)}. Redistribute the {what} to the parameter's placements; "
        "torch.distributed.checkpoint does so for saved state."
    )


def check_placed(tensor: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    """Raise unless a loaded ``tensor`` has the shape, dtype and placement of ``expected``."""
    given, wanted = ((tuple(t.shape), t.dtype, *_placed(t)) for t in (tensor, expected))
    if given != wanted:
        raise ValueError(
            f"{label} has (shape, dtype, mesh, placements) {given}, expected {wanted}; "
            "torch.distributed.checkpoint redistributes saved state, and none can be cast."
        )


def _placed(tensor: torch.Tensor) -> tuple:
    if isinstance(tensor, DTensor):
        return tensor.device_mesh, tuple(tensor.placements)
    return None, None
