# SPDX-License-Identifier: Apache-2.0
"""The state that an optimizer makes at its first step, made without one.

A state can be loaded only into tensors that are there. As torch's own helper does, the optimizer
takes a step with gradients and a learning rate of zero; only parameters without state have a
gradient in it, and what counts steps is set back.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

STEP = "step"  # what torch's optimizers call it


def without_state(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the trainable parameters for which ``optimizer`` has no state yet, or never will."""
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad and not optimizer.state.get(param)
    ]


def make_first_state(optimizer: Optimizer) -> list[nn.Parameter]:
    """Give parameters without state that of step 0; return those that had none.

    Collective where the optimizer's step is. Parameters, gradients and other states stay.
    """
    bare = without_state(optimizer)
    if not bare:
        return []
    with _only_zero_gradients(optimizer, bare), _no_rate(optimizer):
        optimizer.step()
    for param in bare:
        state = optimizer.state.get(param, {})
        if STEP in state:
            state[STEP] = _zero(state[STEP])
    return bare


def drop_state(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Take the state of ``params`` away again."""
    for param in params:
        optimizer.state.pop(param, None)


@contextmanager
def _only_zero_gradients(optimizer: Optimizer, bare: list[nn.Parameter]) -> Iterator[None]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        for param in bare:
            param.grad = torch.zeros_like(param, dtype=getattr(param, "grad_dtype", None))
        yield
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad


@contextmanager
def _no_rate(optimizer: Optimizer) -> Iterator[None]:
    """Let no update change a parameter, weight decay included."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = _zero(rate)
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
