# SPDX-License-Identifier: Apache-2.0
"""Whole parameters of a sharded model, a bucket at a time: for export and inference engines."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from vescale.dtensor import redistribute_many
from vescale.fsdp.fqns import sharded_parameters
from vescale.fsdp.inference import ordinary_tensors
from vescale.fsdp.phases import waiting


def iter_full_parameters(
    model: nn.Module, *, dtype: torch.dtype | None = None, bucket_bytes: int = 256 << 20
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (FQN, whole tensor) of every parameter, in the order of ``named_parameters``.

    Parameters are gathered up to ``bucket_bytes`` of whole tensors at a time (or one larger
    tensor), in one collective for each mesh and dtype among them, or one broadcast for each rank
    that has some where few have. So much memory is held beside what the caller keeps, and up to
    four times that while a bucket is unpacked. Tensors are detached copies on the device of the
    model, the caller's to keep or to change. With ``dtype`` floating-point ones are cast, before
    the gather where that sends less. The names are those of ``state_dict()``; a tied parameter
    comes once, under its first name. Buffers are not sharded and do not come: see
    ``named_buffers()``.

    Collective over the meshes of the parameters: every rank must iterate to the end, or leave the
    loop at the same item. A rank that stops before the others holds nothing back, but they wait
    for it at the next bucket until the process group's timeout, and then raise a RuntimeError
    that names the bucket. Parameters must not change while a loop runs.

    Raises TypeError and ValueError at the call, before any collective.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r}, expected a floating-point torch.dtype or None.")
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes!r}, expected a positive number of bytes.")
    params = sharded_parameters(model)
    for name, param in params.items():
        if param.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values; call init_empty() or load a "
                "checkpoint first."
            )
    return _iterate(_buckets(params, dtype, bucket_bytes), dtype, bucket_bytes)


def _iterate(
    buckets: list[dict[str, nn.Parameter]], dtype: torch.dtype | None, bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for bucket in buckets:
        wholes = _gather(bucket, dtype, bucket_bytes)
        for name in bucket:
            yield name, wholes.pop(name)


@ordinary_tensors
def _gather(
    bucket: dict[str, nn.Parameter], dtype: torch.dtype | None, bucket_bytes: int
) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a bucket, in memory of their own."""
    with torch.no_grad():
        parts: dict[str, Any] = {
            name: param.detach().to(_sent_dtype(param, dtype)) for name, param in bucket.items()
        }
        sharded = [name for name, part in parts.items() if isinstance(part, DTensor)]
        try:
            with waiting("gather of whole parameters"):
                moved = redistribute_many(
                    [parts[name] for name in sharded],
                    [[Replicate()] * parts[name].device_mesh.ndim for name in sharded],
                    bucket_bytes=8 * bucket_bytes,  # above an eighth of it a tensor travels alone
                )
        except NotImplementedError:
            raise
        except RuntimeError as error:
            first, *others = bucket
            raise RuntimeError(
                f"the gather of {first} and {len(others)} parameters after it failed: every rank "
                f"must iterate to the same item, and one may have stopped or died: {error}"
            ) from error
        wholes = {**parts, **dict(zip(sharded, moved, strict=True))}
        return {name: _own(wholes[name], param, dtype) for name, param in bucket.items()}


def _own(whole: torch.Tensor, param: nn.Parameter, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a plain tensor in the dtype asked for that shares no memory with the parameter."""
    whole = whole.to_local() if isinstance(whole, DTensor) else whole
    local = param.to_local() if isinstance(param, DTensor) else param
    if dtype is not None and whole.is_floating_point():
        whole = whole.to(dtype)
    shared = whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return whole.clone() if shared and whole.numel() else whole.detach()


def _sent_dtype(param: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype to gather in: the narrower one."""
    if dtype is None or not param.is_floating_point() or dtype.itemsize > param.dtype.itemsize:
        return param.dtype
    return dtype


def _buckets(
    params: dict[str, nn.Parameter], dtype: torch.dtype | None, bucket_bytes: int
) -> list[dict[str, nn.Parameter]]:
    """Return runs of parameters that together hold at most ``bucket_bytes``, or are one."""
    buckets: list[dict[str, nn.Parameter]] = []
    held = bucket_bytes + 1  # the first one opens a bucket
    for name, param in params.items():
        given = dtype if dtype is not None and param.is_floating_point() else param.dtype
        nbytes = param.numel() * given.itemsize
        if held + nbytes > bucket_bytes:
            buckets.append({})
            held = 0
        buckets[-1][name] = param
        held += nbytes
    return buckets
