# SPDX-License-Identifier: Apache-2.0
"""Options of ``fully_shard``: torch's own value classes, and what may be in them."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["MixedPrecisionPolicy", "check_policy", "compute_dtype"]

_DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype")


def check_policy(policy: MixedPrecisionPolicy) -> None:
    """Raise TypeError or ValueError unless ``policy`` can be carried out."""
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy={policy!r} is a {type(policy).__name__}, expected a MixedPrecisionPolicy; "
            "pass for example MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
        )
    for field in _DTYPE_FIELDS:
        dtype = getattr(policy, field)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"mp_policy.{field}={dtype!r} is no floating-point dtype; pass for example "
                "torch.bfloat16, or None to keep the parameters' dtype."
            )


def compute_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the dtype in which parameters stored in ``dtype`` are gathered and used."""
    if policy.param_dtype is None or not dtype.is_floating_point:
        return dtype
    return policy.param_dtype
