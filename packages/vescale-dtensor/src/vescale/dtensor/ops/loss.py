# SPDX-License-Identifier: Apache-2.0
"""Losses of torch.nn.functional that are one operator: element by element, then a reduction."""

import torch

from vescale.dtensor.ops.pointwise import pointwise
from vescale.dtensor.ops.reduce import REDUCTIONS, bind

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # how torch writes ``reduction=``


def _loss(func, args, kwargs, ref):
    bound = bind(func, args, kwargs)
    reduction = bound["reduction"]
    losses = pointwise(func, list((bound | {"reduction": NONE}).values()), {}, ref)
    if reduction == NONE:
        return losses
    reduce = aten.sum.default if reduction == SUM else aten.mean.default
    return REDUCTIONS[reduce](reduce, [losses], {}, losses)


def _loss_backward(func, args, kwargs, ref):
    """``grad_output`` is one number for the reduced loss, else laid out as the losses are."""
    bound = bind(func, args, kwargs)
    if bound["reduction"] == MEAN:  # of all elements, not of this rank's
        bound |= {"reduction": SUM, "grad_output": bound["grad_output"] / ref.numel()}
    return pointwise(func, list(bound.values()), {}, ref)


LOSSES = dict.fromkeys(
    (
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_with_logits.default,
        aten.huber_loss.default,
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.soft_margin_loss.default,
    ),
    _loss,
) | dict.fromkeys(
    (
        aten.binary_cross_entropy_backward.default,
        aten.huber_loss_backward.default,
        aten.mse_loss_backward.default,
        aten.smooth_l1_loss_backward.default,
        aten.soft_margin_loss_backward.default,
    ),
    _loss_backward,
)
