# SPDX-License-Identifier: Apache-2.0
"""Compare two DTensors: what they are, and this rank's data."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["allclose", "equal"]


def equal(a: DTensor, b: DTensor, exact_device: bool = True) -> bool:
    """Tell whether two DTensors are the same: metadata, and this rank's values.

    Compared are shape, stride, dtype, requires_grad, mesh and placements, and the device unless
    ``exact_device=False``. No communication: ranks may answer differently. On the meta device
    the metadata decides.
    """
    if not _same_metadata(a, b, exact_device):
        return False
    left, right = _locals(a, b)
    return left.is_meta or torch.equal(left, right)


def allclose(
    a: DTensor,
    b: DTensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
    exact_device: bool = True,
) -> bool:
    """Tell the same as ``equal``, with values as close as ``torch.allclose`` asks."""
    if not _same_metadata(a, b, exact_device):
        return False
    left, right = _locals(a, b)
    return left.is_meta or torch.allclose(left, right, rtol, atol, equal_nan)


def _same_metadata(a: DTensor, b: DTensor, exact_device: bool) -> bool:
    for x in (a, b):
        if not isinstance(x, DTensor):
            raise TypeError(f"expected two DTensors, got {type(x).__name__}.")
    first, second = a.device_mesh, b.device_mesh
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.requires_grad == b.requires_grad
        and torch.equal(first.mesh, second.mesh)
        and a.placements == b.placements
        and (not exact_device or a.device == b.device)
    )


def _locals(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = a.detach().to_local(), b.detach().to_local()
    return left, right.to(left.device) if not (left.is_meta or right.is_meta) else right
