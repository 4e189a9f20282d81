# SPDX-License-Identifier: Apache-2.0
"""Options of ``fully_shard``: torch's own value classes, and what may be in them."""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # torch has it from 2.12 on

    @dataclasses.dataclass
    class DataParallelMeshDims:  # type: ignore[no-redef]  # as torch has it
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
    "describe_options",
    "policy_for",
    "without_override",
]

_DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype")
_OVERRIDE = "param_dtype_override_fn"  # torch has it from 2.15 on
_KNOWN_FIELDS = {*_DTYPE_FIELDS, "cast_forward_inputs", _OVERRIDE}


def check_policy(policy: MixedPrecisionPolicy) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless ``policy`` can be carried out."""
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy={policy!r} is a {type(policy).__name__}, expected a MixedPrecisionPolicy; "
            "pass for example MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
        )
    for name in _DTYPE_FIELDS:
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"mp_policy.{name}={dtype!r} is no floating-point dtype; pass for example "
                "torch.bfloat16, or None to keep the parameters' dtype."
            )
    if not isinstance(policy.cast_forward_inputs, bool):
        raise TypeError(
            f"mp_policy.cast_forward_inputs={policy.cast_forward_inputs!r} is a "
            f"{type(policy.cast_forward_inputs).__name__}; pass True or False."
        )
    reduced = policy.reduce_dtype or policy.param_dtype
    if reduced is not None and reduced.itemsize < 2:
        raise ValueError(
            f"mp_policy would reduce gradients in {reduced}, in which torch adds nothing; pass a "
            "reduce_dtype such as torch.bfloat16 or torch.float32."
        )
    override = getattr(policy, _OVERRIDE, None)
    if override is not None and not callable(override):
        raise TypeError(
            f"mp_policy.{_OVERRIDE}={override!r} is a {type(override).__name__}, expected a "
            "function of a parameter that returns a dtype or None."
        )
    for field in dataclasses.fields(policy):  # newer torch has more of them
        value = getattr(policy, field.name)
        if field.name not in _KNOWN_FIELDS and value != field.default:
            raise NotImplementedError(
                f"mp_policy.{field.name}={value!r} is not supported; leave it out, and wrap "
                "modules of other dtypes with a policy of their own."
            )


def policy_for(policy: MixedPrecisionPolicy, fqn: str, param: nn.Parameter) -> MixedPrecisionPolicy:
    """Return what ``policy`` says of one parameter, its override of ``param_dtype`` carried out.

    Raises TypeError or ValueError, naming the parameter, for what the override may not return.
    """
    override = getattr(policy, _OVERRIDE, None)
    if override is None:
        return policy
    dtype = override(param)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"{fqn}: mp_policy.{_OVERRIDE} returned {dtype!r}, a {type(dtype).__name__}, expected "
            "a torch.dtype or None."
        )
    if dtype not in (None, policy.param_dtype, param.dtype):
        raise ValueError(
            f"{fqn}: mp_policy.{_OVERRIDE} returned {dtype}, expected None, param_dtype "
            f"({policy.param_dtype}) or the parameter's own dtype ({param.dtype})."
        )
    plain = without_override(policy)
    return plain if dtype is None else dataclasses.replace(plain, param_dtype=dtype)


def without_override(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return ``policy`` for what is the same on every rank, as a function's name is not."""
    if getattr(policy, _OVERRIDE, None) is None:
        return policy
    plain: dict[str, Any] = {_OVERRIDE: None}
    return dataclasses.replace(policy, **plain)


def compute_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the dtype in which parameters stored in ``dtype`` are gathered and used."""
    if policy.param_dtype is None or not dtype.is_floating_point:
        return dtype
    return policy.param_dtype


def describe_options(
    policy: MixedPrecisionPolicy, offload: OffloadPolicy, **options: object
) -> list[str]:
    """Return the options of a wrap, one text for each, for what is the same on every rank."""
    plain = without_override(policy)
    return [
        *(f"mp_policy.{f.name}={getattr(plain, f.name)}" for f in dataclasses.fields(plain)),
        f"offload_policy={offload}",
        *(f"{name}={value!r}" for name, value in options.items()),
    ]
