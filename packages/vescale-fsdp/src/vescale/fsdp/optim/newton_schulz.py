# SPDX-License-Identifier: Apache-2.0
"""Orthogonalize one matrix by Newton-Schulz iterations, bit for bit as ``torch.optim.Muon`` does.

Sources: https://kellerjordan.github.io/posts/muon/ for the quintic iteration, arXiv:2505.16932
(Polar Express) for coefficients that change from step to step.
"""

from collections.abc import Sequence
from numbers import Integral, Real

import torch

Triple = tuple[float, float, float]
Coefficients = Triple | Sequence[Triple]

DEFAULT_COEFFICIENTS: Triple = (3.4445, -4.7750, 2.0315)
MAX_STEPS = 99  # torch.optim.Muon's own limit


def step_triples(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """Return one (a, b, c) for each of ``steps`` iterations, from one triple or a list of them.

    Raises:
        TypeError: ``steps`` is no integer.
        ValueError: ``steps`` is not in [0, 99], or ``coefficients`` is neither one triple of
            numbers nor a sequence of exactly ``steps`` triples.
    """
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        raise TypeError(f"ns_steps={steps!r} is a {type(steps).__name__}, expected an integer.")
    if not 0 <= steps <= MAX_STEPS:
        raise ValueError(f"ns_steps={steps}, expected 0 to {MAX_STEPS}; 5 is the usual choice.")
    if _is_triple(coefficients):
        return (tuple(coefficients),) * steps
    listed = isinstance(coefficients, Sequence) and len(coefficients) == steps
    if listed and all(_is_triple(triple) for triple in coefficients):
        return tuple(tuple(triple) for triple in coefficients)
    raise ValueError(
        f"ns_coefficients={coefficients!r}, expected three numbers (a, b, c), or a list of "
        f"ns_steps={steps} such triples, one for each iteration."
    )


def newton_schulz(
    grad: torch.Tensor, ns_coefficients: Coefficients, ns_steps: int, eps: float
) -> torch.Tensor:
    """Return the orthogonalized ``grad`` [rows, cols] in bfloat16; ``grad`` is not changed.

    Each iteration maps X to ``a X + (b A + c A A) X`` with ``A = X X^T``, on the wide side. The
    matrix is first divided by its Frobenius norm (at least ``eps``). A constant 1/s on that norm,
    as Polar Express has, is folded into the first triple as ``(a / s, b / s**3, c / s**5)``.

    The strides of ``grad`` decide the order of the sums: for the same bits as torch, pass the
    strides that torch would see.
    """
    tall = grad.size(0) > grad.size(1)
    # A copy, always: torch's plain cast returns a bfloat16 argument itself, and the division
    # below would then normalise the caller's momentum (pytorch/pytorch#190597).
    x = grad.to(torch.bfloat16, copy=True)
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=eps))
    for a, b, c in step_triples(ns_coefficients, ns_steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


def batched_newton_schulz(
    grads: torch.Tensor, ns_coefficients: Coefficients, ns_steps: int, eps: float
) -> torch.Tensor:
    """Return the orthogonalized matrices ``grads`` [batch, rows, cols], as ``newton_schulz`` does.

    Fewer and larger products, which may add in another order: equal up to rounding only.
    """
    tall = grads.size(1) > grads.size(2)
    x = grads.to(torch.bfloat16, copy=True)
    if tall:
        x = x.mT
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps))
    for a, b, c in step_triples(ns_coefficients, ns_steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def _is_triple(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 3
        and all(isinstance(number, Real) for number in value)
    )
