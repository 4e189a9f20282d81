# SPDX-License-Identifier: Apache-2.0
"""Choose the handler of an operator, once per operator."""

import torch

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.ops.foreach import foreach, foreach_inplace
from vescale.dtensor.ops.norm import NORMS
from vescale.dtensor.ops.operands import unsupported
from vescale.dtensor.ops.plain import plain
from vescale.dtensor.ops.pointwise import copy_, pointwise, pointwise_inplace, pointwise_out
from vescale.dtensor.ops.random import RANDOM
from vescale.dtensor.ops.reduce import REDUCTIONS
from vescale.dtensor.ops.view import VIEWS
from vescale.dtensor.spec import layout_of

aten = torch.ops.aten

# Not tagged pointwise by torch, but they map every element on its own (or make new ones).
_LIKE_POINTWISE = {
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.lift_fresh.default,
    aten.ones_like.default,
    aten.zeros_like.default,
}
_FILLS = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
_FUSED = {"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"}
_NOT_ELEMENTWISE = {"_foreach_max", "_foreach_mm", "_foreach_norm", "_foreach_powsum"}
_SPECIAL = {
    aten.copy_.default: copy_,
    **NORMS,
    **REDUCTIONS,
    **RANDOM,
    **VIEWS,
}
_handlers = {}


def dispatch(cls, func, args, kwargs):
    """Run operator ``func``, one of whose arguments is of our class ``cls``."""
    ref = _first_ragged(args)
    if ref is None and kwargs:
        ref = _first_ragged(kwargs.values())
    if ref is None:
        return plain(cls, func, args, kwargs)
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _classify(func)
    return handler(func, args, kwargs, ref)


def _first_ragged(args):
    for a in args:
        if isinstance(a, TorchDTensor):
            if layout_of(a._spec) is not None:
                return a
        elif type(a) is list or type(a) is tuple:
            ragged = _first_ragged(a)
            if ragged is not None:
                return ragged
    return None


def _classify(func):
    if func in _SPECIAL:
        return _SPECIAL[func]
    name = func._schema.name.removeprefix("aten::")
    inplace = name.endswith("_") and not name.endswith("__")
    if name in _FUSED or (name.startswith("_foreach_") and name not in _NOT_ELEMENTWISE):
        return foreach_inplace if inplace else foreach
    if func in _LIKE_POINTWISE:
        return pointwise
    if func in _FILLS:
        return pointwise_inplace
    if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
        if any(argument.is_out for argument in func._schema.arguments):
            return pointwise_out
        return pointwise_inplace if inplace else pointwise
    return _refuse


def _refuse(func, args, kwargs, ref):
    return unsupported(func, "this operator needs whole tensors", ref)
