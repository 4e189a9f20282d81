# SPDX-License-Identifier: Apache-2.0
"""Operators on lists of tensors: what foreach and fused optimizers call."""

from operator import attrgetter, is_

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.ops.operands import local_operand, rewrap, unsupported
from vescale.dtensor.spec import layout_of

_spec, _local = attrgetter("_spec"), attrgetter("_local_tensor")


def foreach(func, args, kwargs, ref):
    """Run a list operator on local parts; returned lists are laid out like the first argument."""
    out = func(*_local_args(func, args), **_local_kwargs(func, kwargs))
    if not out:
        return out
    return [
        rewrap(part, x) if isinstance(x, TorchDTensor) else part
        for part, x in zip(out, args[0], strict=True)
    ]


def foreach_inplace(func, args, kwargs, ref):
    """Run a list operator in place on the local parts of its arguments."""
    func(*_local_args(func, args), **_local_kwargs(func, kwargs))
    return args[0] if func._schema.returns else None


def _local_args(func, args):
    first = args[0]
    specs = [getattr(x, "_spec", None) for x in first]
    parts = []
    for a in args:
        if type(a) is not list and type(a) is not tuple:
            parts.append(_single(func, a))
        elif a is first:
            parts.append([getattr(x, "_local_tensor", x) for x in a])
        else:
            parts.append(_row(func, a, first, specs))
    return parts


def _row(func, row, first, specs):
    """Return the local parts of ``row``, each in the layout of its neighbour in ``first``."""
    try:
        if len(row) == len(specs) and all(map(is_, map(_spec, row), specs)):
            return list(map(_local, row))
    except AttributeError:  # scalars or plain tensors among them
        pass
    if len(row) != len(first):
        return [_single(func, x) for x in row]
    return [
        local_operand(func, x, ref) if _is_ragged(ref) else _beside_plain(func, x, ref)
        for x, ref in zip(row, first, strict=True)
    ]


def _single(func, a):
    """Return an operand that is applied to every tensor of the list: a scalar, 0-dim tensor."""
    if not isinstance(a, TorchDTensor):
        return a
    if a.ndim == 0 and all(placement.is_replicate() for placement in a._spec.placements):
        return a._local_tensor
    return unsupported(func, "an operand for the whole list must be a replicated scalar", a)


def _beside_plain(func, x, ref):
    """Return the local part of ``x`` next to a tensor that is not ragged."""
    if not isinstance(x, TorchDTensor):
        return x
    if isinstance(ref, TorchDTensor) and x._spec.placements == ref._spec.placements:
        return x._local_tensor
    return _single(func, x)


def _is_ragged(x):
    return isinstance(x, TorchDTensor) and layout_of(x._spec) is not None


def _local_kwargs(func, kwargs):
    return {name: _single(func, value) for name, value in kwargs.items()}
