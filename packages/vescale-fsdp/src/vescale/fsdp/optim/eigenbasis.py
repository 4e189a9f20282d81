# SPDX-License-Identifier: Apache-2.0
"""One SOAP block [m, n]: Adam in the eigenbasis of its gradients' second moments.

Sources: arXiv:2409.11321 (SOAP), arXiv:2509.03378 (the factors of KL-Shampoo). The state of a block
is a mapping of tensors, all changed in place:

    exp_avg [m, n]         mean gradient, in the parameter's own basis
    exp_avg_sq [m, n]      mean square of the gradient, in the eigenbasis
    row_factor [m, m], col_factor [n, n]    mean of G G^T and of G^T G
    row_basis [m, m], col_basis [n, n]      their eigenvectors, as columns, the largest first
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

State = Mapping[str, torch.Tensor]

_LEAST = 1e-30


@dataclass(frozen=True, slots=True)
class SoapOptions:
    """``shampoo_beta`` averages the factors; ``kl`` weighs them by each other's inverse."""

    betas: tuple[float, float]
    shampoo_beta: float
    eps: float
    kl: bool


def state_shapes(rows: int, cols: int) -> dict[str, tuple[int, int]]:
    """Return the state of a block by name, with shapes."""
    return {
        "exp_avg": (rows, cols),
        "exp_avg_sq": (rows, cols),
        "row_factor": (rows, rows),
        "col_factor": (cols, cols),
        "row_basis": (rows, rows),
        "col_basis": (cols, cols),
    }


def soap_update(
    grad: torch.Tensor, state: State, options: SoapOptions, step: int, *, refresh: bool
) -> torch.Tensor:
    """Return what the learning rate multiplies, [m, n], and update ``state``.

    ``step`` counts the gradients of the block from 1. The first one only makes the bases, so that
    no gradient is divided by itself: its update is zero. ``refresh`` turns the bases afterwards.
    """
    if step == 1:
        _update_factors(grad, state, options, 0.0)
        if options.kl:
            _make_invertible(state)
        for side in ("row", "col"):
            state[f"{side}_basis"].copy_(_eigenvectors(state[f"{side}_factor"]))
        return torch.zeros_like(grad)
    beta1, beta2 = options.betas
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(grad, 1 - beta1)
    turned = _turn(grad, state)
    square.mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
    divisor = (square / (1 - beta2 ** (step - 1))).sqrt_().add_(options.eps)
    update = _turn(mean, state).div_(divisor).div_(1 - beta1 ** (step - 1))
    update = state["row_basis"] @ update @ state["col_basis"].mT
    _update_factors(grad, state, options, options.shampoo_beta)
    if refresh:
        _refresh(state)
    return update


def flops(rows: int, cols: int, frequency: int) -> int:
    """Return about how many operations a step takes: products, and a share of the refresh."""
    products = 4 * 2 * rows * cols * (rows + cols)
    return products + 8 * (rows**3 + cols**3) // frequency


def _turn(matrix: torch.Tensor, state: State) -> torch.Tensor:
    return state["row_basis"].mT @ matrix @ state["col_basis"]


def _update_factors(grad: torch.Tensor, state: State, options: SoapOptions, beta: float) -> None:
    rows, cols = grad.shape
    left = right = grad
    if options.kl:
        # G C^-1 G^T / n and G^T R^-1 G / m, with the inverses of what the factors are now.
        scale = (1 / math.sqrt(cols), 1 / math.sqrt(rows))
        if beta:
            left = _whiten(grad.mT, state["col_factor"], state["col_basis"], options.eps).mT
            right = _whiten(grad, state["row_factor"], state["row_basis"], options.eps)
        left, right = left * scale[0], right * scale[1]
    state["row_factor"].lerp_(left @ left.mT, 1 - beta)
    state["col_factor"].lerp_(right.mT @ right, 1 - beta)


def _make_invertible(state: State) -> None:
    """Spread half of each factor evenly over all directions: one gradient spans only some."""
    for side in ("row", "col"):
        factor = state[f"{side}_factor"]
        mean = factor.diagonal().mean()
        factor.mul_(0.5).diagonal().add_(0.5 * mean)


def _whiten(
    matrix: torch.Tensor, factor: torch.Tensor, basis: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the coordinates of ``matrix`` [m, n] in ``basis`` [m, m], over standard deviations."""
    deviations = (basis * (factor @ basis)).sum(0).clamp(min=0).sqrt()
    return basis.mT @ matrix / (deviations + eps)[:, None]


def _eigenvectors(factor: torch.Tensor) -> torch.Tensor:
    shifted = factor.clone()
    shifted.diagonal().add_(_LEAST)
    return torch.linalg.eigh(shifted).eigenvectors.flip(-1)


def _refresh(state: State) -> None:
    """Take one step of power iteration towards the eigenvectors, largest eigenvalue first.

    ``exp_avg_sq`` follows the new order of the basis.
    """
    for dim, side in enumerate(("row", "col")):
        factor, basis = state[f"{side}_factor"], state[f"{side}_basis"]
        eigenvalues = (basis * (factor @ basis)).sum(0)
        order = eigenvalues.argsort(descending=True, stable=True)
        square = state["exp_avg_sq"]
        square.copy_(square.index_select(dim, order))
        basis.copy_(torch.linalg.qr(factor @ basis.index_select(1, order)).Q)
