# SPDX-License-Identifier: Apache-2.0
"""Operators without a ragged operand: torch's own DTensor runs them, our class wraps them."""

from vescale.dtensor._torch_compat import TorchDTensor, wrap


def plain(cls, func, args, kwargs):
    """Run ``func`` on torch's own DTensors over the same local data; return our class."""
    stand_ins = {}  # id of torch's tensor -> (torch's tensor, ours)

    def lower(a):
        if isinstance(a, TorchDTensor) and type(a) is not TorchDTensor:
            x = wrap(TorchDTensor, a._local_tensor, a._spec, requires_grad=False)
            stand_ins[id(x)] = (x, a)
            return x
        return type(a)(map(lower, a)) if type(a) in (list, tuple) else a

    def lift(a):
        if type(a) is TorchDTensor:
            known = stand_ins.get(id(a))  # an in-place or out= operator returns its argument
            return known[1] if known else wrap(cls, a._local_tensor, a._spec, requires_grad=False)
        return type(a)(map(lift, a)) if type(a) in (list, tuple) else a

    out = func(*map(lower, args), **{name: lower(value) for name, value in kwargs.items()})
    for x, ours in stand_ins.values():
        if ours._spec is not x._spec:  # an in-place operator may change the placements
            ours._spec = x._spec
    return lift(out)
