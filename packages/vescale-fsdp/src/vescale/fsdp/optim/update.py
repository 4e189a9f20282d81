# SPDX-License-Identifier: Apache-2.0
"""Apply an orthogonalized update to a part of a matrix with the bits of ``torch.optim.Muon``."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

# A multiple of every CPU vector length, in elements of two bytes.
_VECTOR_NUMEL = 64


def scales(shape: tuple[int, int], group: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the factor of the weights and the one of the update, rounded as torch rounds them.

    ``shape`` is that of the matrix which is orthogonalized.
    """
    lr = group["lr"]
    if isinstance(lr, torch.Tensor):
        lr = lr.squeeze()  # stays a tensor, so that products round in its dtype
    rows, cols = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, cols))
    else:
        ratio = math.sqrt(max(1, rows / cols))
    return 1 - lr * group["weight_decay"], -(lr * ratio)


def narrow(update: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Cast an update to bfloat16 if the parameter is: the sum of the two rounds differently."""
    return update.to(torch.bfloat16) if param.dtype == torch.bfloat16 else update


def add_as_whole(
    local: torch.Tensor, update: torch.Tensor, alpha: Any, start: int, shape: tuple[int, int]
) -> None:
    """Add ``alpha * update`` in place, with the bits that torch gives to the whole matrix.

    ``local`` begins at element ``start`` of a contiguous matrix of ``shape``. On a CPU, bfloat16
    elements that torch adds one by one round once more than those it adds in vectors. It adds one
    by one where strides differ, which they do for tall matrices, since Newton-Schulz returns
    these transposed; and the last few elements of any matrix.
    """
    if local.dtype != torch.bfloat16 or local.device.type != "cpu":
        local.add_(update, alpha=alpha)
        return
    rows, cols = shape
    if rows > cols > 1:
        strided = update.new_empty(2 * local.numel())[::2]
        strided.copy_(update.reshape(-1))
        local.copy_(local.reshape(-1).add(strided, alpha=alpha).view(local.shape))
        return
    # Vectors begin, and the remainder lies, where they would in the whole matrix.
    before = start % _VECTOR_NUMEL
    end = start + local.numel()
    after = min(-end % _VECTOR_NUMEL, rows * cols - end)
    padded, increment = (F.pad(t.reshape(-1), (before, after)) for t in (local, update))
    padded.add_(increment, alpha=alpha)
    local.copy_(padded.narrow(0, before, local.numel()).view(local.shape))
