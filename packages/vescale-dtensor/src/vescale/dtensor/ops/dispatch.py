# SPDX-License-Identifier: Apache-2.0
"""Choose the handler of an operator, once per operator, and call it."""

import torch

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.ops.foreach import foreach, foreach_inplace
from vescale.dtensor.ops.loss import LOSSES
from vescale.dtensor.ops.norm import NORMS
from vescale.dtensor.ops.operands import USUAL_CAUSES, unsupported
from vescale.dtensor.ops.pending import check_pending
from vescale.dtensor.ops.plain import plain
from vescale.dtensor.ops.pointwise import (
    LIKE_POINTWISE,
    SHAPED_ALIKE,
    pointwise,
    pointwise_inplace,
    pointwise_out,
)
from vescale.dtensor.ops.random import RANDOM
from vescale.dtensor.ops.reduce import REDUCTIONS
from vescale.dtensor.ops.view import VIEWS
from vescale.dtensor.spec import check_is_ours, layout_of

_FUSED = {"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"}
_NOT_ELEMENTWISE = {"_foreach_max", "_foreach_mm", "_foreach_norm", "_foreach_powsum"}
_handlers = {**SHAPED_ALIKE, **NORMS, **REDUCTIONS, **LOSSES, **RANDOM, **VIEWS}


def dispatch(cls, func, types, args=(), kwargs=None):
    """Run operator ``func``, one of whose arguments is of our class ``cls``.

    This is the ``__torch_dispatch__`` of the class, so every line is paid by every operator.
    """
    kwargs = kwargs or {}
    ref = args[0] if args else None
    layout = layout_of(ref._spec) if type(ref) is cls else None
    if layout is None:  # not the first argument: in a list, behind a plain one, or not at all
        ref = _first_ragged(args) if args else None
        if ref is None and kwargs:
            ref = _first_ragged(kwargs.values())
        if ref is None:
            return plain(cls, func, args, kwargs)
        layout = layout_of(ref._spec)
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = classify(func)
    if layout.pending:
        check_pending(func, args, kwargs, ref)
    return handler(func, args, kwargs, ref)


def _first_ragged(args):
    for a in args:
        if isinstance(a, TorchDTensor):
            check_is_ours(a)
            if layout_of(a._spec) is not None:
                return a
        elif type(a) is list or type(a) is tuple:
            ragged = _first_ragged(a)
            if ragged is not None:
                return ragged
    return None


def classify(func):
    """Return the handler of an operator that no table names; ``refuse`` when there is none."""
    if func.namespace != "aten":
        return refuse
    name = func._schema.name.removeprefix("aten::")
    inplace = name.endswith("_") and not name.endswith("__")
    writes_out = any(argument.is_out for argument in func._schema.arguments)
    if name in _FUSED or (name.startswith("_foreach_") and name not in _NOT_ELEMENTWISE):
        return refuse if writes_out else foreach_inplace if inplace else foreach
    if not (_is_pointwise(func) or (inplace and _is_pointwise(_functional(func, name[:-1])))):
        return refuse
    if writes_out:
        return pointwise_out
    return pointwise_inplace if inplace else pointwise


def _is_pointwise(func) -> bool:
    return func in LIKE_POINTWISE or (
        func is not None
        and torch.Tag.pointwise in func.tags
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _functional(func, name):
    """Return the functional twin of an in-place operator: not every in-place one has its tag."""
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, func._overloadname, None) if packet else None


def refuse(func, args, kwargs, ref):
    """Raise NotImplementedError with the remedy."""
    return unsupported(func, "this operator needs whole tensors", ref, hint=USUAL_CAUSES)
