# SPDX-License-Identifier: Apache-2.0
"""AdamW's update of flat float32 tensors: arXiv:1711.05101, as ``torch.optim.AdamW`` has it.

Only products, sums, quotients and roots, one at a time: IEEE 754 rounds each of these exactly, so
an element gets the same bits wherever it lies. Fused operations such as ``addcdiv`` round once
less, where they are fused at all: in vectors, say, and not in what remains at a tensor's end.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from vescale.fsdp._torch_compat import (
    foreach_add_,
    foreach_div,
    foreach_div_,
    foreach_mul,
    foreach_mul_,
    foreach_sqrt,
    foreach_sub,
    foreach_sub_,
)


def adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    group: Mapping[str, Any],
    step: int,
) -> None:
    """Update ``params`` and both moments in place; ``step`` counts from 1."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step

    change = foreach_sub(grads, exp_avgs)
    foreach_mul_(change, 1 - beta1)
    foreach_add_(exp_avgs, change)

    squares = foreach_mul(grads, grads)
    foreach_mul_(squares, 1 - beta2)
    foreach_mul_(exp_avg_sqs, beta2)
    foreach_add_(exp_avg_sqs, squares)

    divisors = foreach_sqrt(exp_avg_sqs)
    foreach_div_(divisors, math.sqrt(correction2))
    foreach_add_(divisors, group["eps"])
    updates = foreach_div(exp_avgs, divisors)
    foreach_mul_(updates, lr / correction1)
    foreach_mul_(params, 1 - lr * group["weight_decay"])
    foreach_sub_(params, updates)
