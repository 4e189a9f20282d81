# SPDX-License-Identifier: Apache-2.0
"""Clip gradients by their norm over the ranks that hold parts of them."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

__all__ = ["clip_grad_norm_fp32"]


def clip_grad_norm_fp32(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    grads_for_norm: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2,
    model_parallel_group: dist.ProcessGroup | None = None,
) -> float:
    """Scale the gradients of ``parameters`` in place to ``max_norm`` at most; return the norm.

    The norm is that of ``grads_for_norm`` of all ranks of the group (default: the world): no
    element twice. ``norm_type`` may be infinite. The scale is ``max_norm / (norm + 1e-6)``. One
    all-reduce, of one number.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    counted = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    device = next((grad.device for grad in (*grads, *counted)), torch.device("cpu"))
    infinite = norm_type == float("inf")
    norms = [torch.linalg.vector_norm(grad.float(), norm_type) for grad in counted if grad.numel()]
    total = torch.zeros((), device=device)
    if norms:
        stacked = torch.stack(norms)
        total = stacked.max() if infinite else stacked.pow(norm_type).sum()
    op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    dist.all_reduce(total, op, group=model_parallel_group)
    norm = total.item() if infinite else total.item() ** (1.0 / norm_type)
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (norm + 1e-6))
    return norm
