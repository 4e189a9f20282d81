# SPDX-License-Identifier: Apache-2.0
"""Wait for the results of collectives, and for gradients."""

from typing import Any

import torch

from vescale.legacy._torch_compat import AsyncCollectiveTensor

__all__ = ["wait", "wait_gradient"]


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with its data there; a plain tensor is returned as it is.

    Differentiable where ``tensor`` is.
    """
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    return _Wait.apply(tensor) if tensor.requires_grad else tensor.wait()


def wait_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a view whose gradient is waited for before it flows on."""
    return _WaitGradient.apply(tensor) if tensor.requires_grad else tensor


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        done = tensor.wait()
        return done.view_as(done)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _WaitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return wait(grad)
