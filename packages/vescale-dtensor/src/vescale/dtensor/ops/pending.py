# SPDX-License-Identifier: Apache-2.0
"""What may be done to a ragged tensor that still has to be reduced over another mesh axis.

Its local values are terms of a sum, not values, so only linear operators are right.
"""

import torch

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.ops.operands import unsupported
from vescale.dtensor.ops.view import VIEWS

aten = torch.ops.aten

_UNCHANGED = {
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.zero_.default,
    *VIEWS,
}
_ADDING = {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor}
_SCALING = {
    getattr(packet, overload)
    for packet in (aten.mul, aten.mul_, aten.div, aten.div_)
    for overload in ("Tensor", "Scalar")
} | {aten.neg.default, aten.neg_.default}


def check_pending(func, args, kwargs, ref) -> None:
    """Raise NotImplementedError unless ``func`` is right on the terms of a sum."""
    if func in _UNCHANGED:
        return
    linear = all(
        placement.reduce_op in ("sum", "avg")
        for placement in ref._spec.placements
        if placement.is_partial()
    )
    others = args[1:]
    if linear and func in _ADDING:
        if all(isinstance(a, TorchDTensor) and a.placements == ref.placements for a in args):
            return
    elif linear and func in _SCALING and args[0] is ref:
        if not any(isinstance(a, TorchDTensor) or getattr(a, "ndim", 0) for a in others):
            return
    elif linear and func is aten._to_copy.default and _keeps_fractions(ref.dtype, kwargs):
        return
    unsupported(func, "the Partial placement still has to be reduced", ref)


def _keeps_fractions(dtype: torch.dtype, kwargs) -> bool:
    target = kwargs.get("dtype") or dtype
    return dtype.is_floating_point and (target.is_floating_point or target.is_complex)
