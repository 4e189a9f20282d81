# SPDX-License-Identifier: Apache-2.0
"""Options of ``fully_shard``: torch's own value classes, and what may be in them."""

import dataclasses

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # torch has it from 2.12 on

    @dataclasses.dataclass
    class DataParallelMeshDims:
        """Names of the axes of a larger mesh that shard and replicate; several make one axis."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None


__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "check_policy",
    "compute_dtype",
]

_DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype")
_KNOWN_FIELDS = {*_DTYPE_FIELDS, "cast_forward_inputs"}


def check_policy(policy: MixedPrecisionPolicy) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless ``policy`` can be carried out."""
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
    for field in dataclasses.fields(policy):  # newer torch has more of them
        value = getattr(policy, field.name)
        if field.name not in _KNOWN_FIELDS and value != field.default:
            raise NotImplementedError(
                f"mp_policy.{field.name}={value!r} is not supported; leave it out, and wrap "
                "modules of other dtypes with a policy of their own."
            )


def compute_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the dtype in which parameters stored in ``dtype`` are gathered and used."""
    if policy.param_dtype is None or not dtype.is_floating_point:
        return dtype
    return policy.param_dtype
