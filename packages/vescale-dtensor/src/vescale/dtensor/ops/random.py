# SPDX-License-Identifier: Apache-2.0
"""In-place random fills that equal those of one device, bit by bit.

Every rank draws the whole tensor and keeps its part. When the generators of all ranks are in the
same state (one ``torch.manual_seed``), the values are those of a single process and the
generators stay in step. The cost is one whole tensor of transient memory, and its draws.
"""

import torch

from vescale.dtensor.ops.operands import slice_of, unsupported

aten = torch.ops.aten


def _fill(func, args, kwargs, ref):
    if args[0] is not ref:
        unsupported(func, "a ragged tensor cannot parametrise a random fill", *args)
    local = ref._local_tensor
    if not local.is_meta:
        whole = torch.empty(ref.shape, dtype=local.dtype, device=local.device)
        func(whole, *args[1:], **kwargs)
        local.copy_(slice_of(func, whole, ref))
    return ref


RANDOM = dict.fromkeys(
    (
        aten.bernoulli_.float,
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
)
