# SPDX-License-Identifier: Apache-2.0
"""Random tensors and in-place random fills that equal those of one device, bit by bit.

Every rank draws the whole tensor and keeps its part. When the generators of all ranks are in the
same state (one ``torch.manual_seed``), the values are those of a single process and the
generators stay in step. The cost is one whole tensor of transient memory, and its draws.
"""

import torch

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.ops.operands import rewrap, slice_of, unsupported

aten = torch.ops.aten


def _fill(func, args, kwargs, ref):
    if args[0] is not ref or any(isinstance(a, TorchDTensor) for a in args[1:]):
        unsupported(
            func, "only numbers and plain tensors, alike on all ranks, parametrise a fill", *args
        )
    local = ref._local_tensor
    if not local.is_meta:
        whole = torch.empty(ref.shape, dtype=local.dtype, device=local.device)
        func(whole, *args[1:], **kwargs)
        local.copy_(slice_of(func, whole, ref))
    return ref


def _like(func, args, kwargs, ref):
    """``rand_like(x)`` and its like: laid out as ``x``."""
    local = ref._local_tensor
    if local.is_meta:
        return rewrap(func(local, *args[1:], **kwargs), ref)
    like = torch.empty(ref.shape, dtype=local.dtype, device=local.device)
    whole = func(like, *args[1:], **kwargs)
    return rewrap(slice_of(func, whole, ref).clone(), ref)


RANDOM = dict.fromkeys(
    (
        aten.bernoulli_.float,
        aten.bernoulli_.Tensor,
        aten.cauchy_.default,
        aten.exponential_.default,
        aten.geometric_.default,
        aten.log_normal_.default,
        aten.normal_.default,
        aten.random_.default,
        getattr(aten.random_, "from"),
        aten.random_.to,
        aten.uniform_.default,
    ),
    _fill,
) | dict.fromkeys(
    [
        getattr(packet, overload)
        for packet in (aten.rand_like, aten.randn_like, aten.randint_like)
        for overload in packet.overloads()
        if overload in ("default", "generator", "low_dtype", "low_generator_dtype")
    ],
    _like,
)
