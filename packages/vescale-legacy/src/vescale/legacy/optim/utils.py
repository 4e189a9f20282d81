# SPDX-License-Identifier: Apache-2.0
"""Which rank counts a parameter in a norm over all ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["param_is_sharded_or_replicate_on_first_rank"]


def param_is_sharded_or_replicate_on_first_rank(
    param: torch.Tensor, data_parallel_ranks: Sequence[int] = ()
) -> bool:
    """Tell whether this rank counts ``param``, so that each element is counted once.

    True for what is sharded, for the first of its replicas, and for plain tensors. Mesh dims
    whose ranks are ``data_parallel_ranks`` are passed by.
    """
    if not isinstance(param, DTensor):
        return True
    place = param.device_mesh.get_coordinate()
    for axis, placement in enumerate(param.placements):
        ranks = dist.get_process_group_ranks(param.device_mesh.get_group(axis))
        if placement.is_replicate() and place[axis] and ranks != list(data_parallel_ranks):
            return False
    return True
