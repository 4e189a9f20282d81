# SPDX-License-Identifier: Apache-2.0
"""Operators on lists of tensors: what foreach and fused optimizers call."""

import torch
from torch.autograd.graph import increment_version

from vescale.dtensor._torch_compat import TorchDTensor, list_kernel, wrap
from vescale.dtensor.ops.operands import alike, local_operand, mixed, rewrap, unsupported
from vescale.dtensor.spec import check_is_ours, layout_of


def foreach(func, args, kwargs, ref):
    """Run a list operator on local parts; results are laid out like the first list."""
    first = _first_list(args)
    out = list_kernel(func)(*_local_args(func, args, first), **_local_kwargs(func, kwargs))
    return [_rewrap(part, x) for part, x in zip(out, first, strict=True)]


def foreach_inplace(func, args, kwargs, ref):
    """Run a list operator in place on the local parts of its arguments."""
    list_kernel(func)(*_local_args(func, args, args[0]), **_local_kwargs(func, kwargs))
    # torch counts writes to the parts only; FSDP looks at the wholes for a step of the optimizer.
    increment_version(args[0])


def _rewrap(part, x):
    if not isinstance(x, TorchDTensor):
        return part
    spec = x._spec
    if part.dtype is not spec.tensor_meta.dtype:
        return rewrap(part, x)
    return wrap(type(x), part, spec, requires_grad=False)


def _first_list(args):
    return next(a for a in args if type(a) in (list, tuple))


def _local_args(func, args, first):
    specs, parts = _split_first(func, first)
    return [
        parts
        if a is first
        else _row(func, a, first, specs)
        if type(a) is list or type(a) is tuple
        else _single(func, a)
        for a in args
    ]


def _split_first(func, first):
    """Return the specs (None for plain tensors) and the local parts of the leading list."""
    try:
        specs = [x._spec for x in first]
        if True not in [spec._vescale_layout.pending for spec in specs]:  # usual, so in a hurry
            return specs, [x._local_tensor for x in first]
    except AttributeError:
        pass
    for x in first:
        if isinstance(x, TorchDTensor):
            check_is_ours(x)
        if isinstance(x, TorchDTensor) and any(p.is_partial() for p in x._spec.placements):
            unsupported(func, "a Partial placement still has to be reduced", x)
    specs = [getattr(x, "_spec", None) for x in first]
    return specs, [getattr(x, "_local_tensor", x) for x in first]


def _row(func, row, first, specs):
    """Return the local parts of ``row``, each in the layout of its neighbour in ``first``."""
    try:
        if [x._spec for x in row] == specs and TorchDTensor not in set(map(type, row)):
            return [x._local_tensor for x in row]
    except AttributeError:  # scalars or plain tensors among them
        pass
    if _are_scalars(row):
        return row
    if len(row) != len(first):
        return [_single(func, x) for x in row]
    for x in row:
        if isinstance(x, TorchDTensor):
            check_is_ours(x)
    return [
        x._local_tensor
        if isinstance(x, TorchDTensor) and spec is not None and alike(x._spec, spec)
        else _operand(func, x, ref)
        for x, spec, ref in zip(row, specs, first, strict=True)
    ]


def _are_scalars(row):
    """Tell whether a list has numbers or plain 0-dim tensors only, such as steps."""
    types = set(map(type, row))
    if types <= {torch.Tensor}:
        return not any(x.ndim for x in row)
    return types <= {float, int, complex, bool}


def _operand(func, x, ref):
    return local_operand(func, x, ref) if _is_ragged(ref) else _beside_plain(func, x, ref)


def _single(func, a):
    """Return an operand that is applied to every tensor of the list: a scalar, 0-dim tensor."""
    if not isinstance(a, TorchDTensor):
        return a
    if a.ndim == 0 and all(placement.is_replicate() for placement in a._spec.placements):
        return a._local_tensor
    return unsupported(func, "an operand for the whole list must be a replicated scalar", a)


def _beside_plain(func, x, ref):
    """Return the local part of ``x`` next to a tensor that is not ragged."""
    if isinstance(x, TorchDTensor):
        if _is_ragged(x) and isinstance(ref, torch.Tensor) and not isinstance(ref, TorchDTensor):
            mixed(func, ref, x)
        return _single(func, x)
    if isinstance(x, torch.Tensor) and isinstance(ref, TorchDTensor) and x.ndim > 0:
        unsupported(func, "a plain tensor is mixed with a DTensor", ref)
    return x


def _is_ragged(x):
    return isinstance(x, TorchDTensor) and layout_of(x._spec) is not None


def _local_kwargs(func, kwargs):
    if not kwargs:
        return kwargs
    return {name: _single(func, value) for name, value in kwargs.items()}
