# SPDX-License-Identifier: Apache-2.0
"""Operators without a ragged operand."""

from typing import Any

import torch

from vescale.dtensor._torch_compat import (
    TorchDTensor,
    implicit_replication_enabled,
    kernel,
    spec_with_meta,
    wrap,
)
from vescale.dtensor.random.operators import HANDLERS as RANDOM

_local_is_enough: dict[
    Any, bool
] = {}  # operator -> whether its result on replicas is the replicated result


def plain(cls, func, args, kwargs):
    """Run ``func`` on plain placements and return our class.

    When every operand is replicated, each rank computes the whole result from its local tensors.
    Random operators draw what one device draws. Anything else is handed to torch's own DTensor.
    """
    enough = _local_is_enough.get(func)
    if enough is None:
        enough = _judge(func)
        _local_is_enough[func] = enough
    if enough:
        found: list = []
        if _collect_replicated(args, found) and _collect_replicated(kwargs.values(), found):
            return _run_local(cls, func, args, kwargs, found)
    elif func in RANDOM and args and isinstance(args[0], cls):
        return RANDOM[func](func, args, kwargs)
    return _run_torch(cls, func, args, kwargs)


def _judge(func) -> bool:
    shapes = torch.Tag.inplace_view in func.tags and func is not torch.ops.aten.detach_.default
    if shapes:  # the shape of our wrapper could not follow
        raise NotImplementedError(f"{func} changes a shape in place; use the out-of-place form.")
    return (
        func.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in func.tags  # torch keeps replicas in step
        and not any(argument.is_out for argument in func._schema.arguments)
    )


def _collect_replicated(operands, found) -> bool:
    """Append the DTensors among ``operands``; False unless they are replicas on one mesh."""
    for a in operands:
        if isinstance(a, TorchDTensor):
            for placement in a._spec.placements:
                if not placement.is_replicate():
                    return False
            if found and a._spec.mesh is not found[0]._spec.mesh:
                return False
            found.append(a)
        elif isinstance(a, torch.Tensor):
            if a.ndim > 0 and not implicit_replication_enabled():
                return False
        elif type(a) in (list, tuple) and not _collect_replicated(a, found):
            return False
    return True


def _run_local(cls, func, args, kwargs, found):
    spec = found[0]._spec

    def lift(out):
        if isinstance(out, torch.Tensor):
            for a in found:
                if a._local_tensor is out:  # an in-place operator returns its argument
                    return a
            meta = spec.tensor_meta
            if out.shape == meta.shape and out.dtype is meta.dtype and out.stride() == meta.stride:
                return wrap(cls, out, spec, requires_grad=False)
            new = spec_with_meta(spec, out.shape, out.stride(), out.dtype)
            return wrap(cls, out, new, requires_grad=False)
        return type(out)(map(lift, out)) if type(out) in (list, tuple) else out

    return lift(func(*map(_local, args), **{name: _local(a) for name, a in kwargs.items()}))


def _local(a):
    if isinstance(a, TorchDTensor):
        return a._local_tensor
    return type(a)(map(_local, a)) if type(a) in (list, tuple) else a


def _run_torch(cls, func, args, kwargs):
    stand_ins = []  # (torch's tensor, ours)
    lowered = []
    for a in args:
        if type(a) is cls:  # inline: the usual case
            x = wrap(TorchDTensor, a._local_tensor, a._spec, requires_grad=False)
            stand_ins.append((x, a))
            lowered.append(x)
        else:
            lowered.append(_lower(a, stand_ins))
    if kwargs:
        kwargs = {name: _lower(value, stand_ins) for name, value in kwargs.items()}
    out = kernel(func)(*lowered, **kwargs)
    for x, ours in stand_ins:  # an in-place operator may change the placements
        if ours._spec is not x._spec:
            ours._spec = x._spec
        if ours._local_tensor is not x._local_tensor:
            ours._local_tensor = x._local_tensor
    if type(out) is TorchDTensor:
        for x, ours in stand_ins:
            if x is out:  # an in-place or out= operator returns its argument
                return ours
        return wrap(cls, out._local_tensor, out._spec, requires_grad=False)
    return _lift(cls, out, {id(x): ours for x, ours in stand_ins})


def _lower(a, stand_ins):
    if isinstance(a, TorchDTensor):
        if type(a) is TorchDTensor:
            return a
        x = wrap(TorchDTensor, a._local_tensor, a._spec, requires_grad=False)
        stand_ins.append((x, a))
        return x
    return type(a)(_lower(b, stand_ins) for b in a) if type(a) in (list, tuple) else a


def _lift(cls, out, known):
    if type(out) is TorchDTensor:
        found = known.get(id(out))
        return (
            wrap(cls, out._local_tensor, out._spec, requires_grad=False) if found is None else found
        )
    return type(out)(_lift(cls, x, known) for x in out) if type(out) in (list, tuple) else out
