# SPDX-License-Identifier: Apache-2.0
"""The old ``vescale.dtensor``: its functions and placements over torch's ``DTensor``."""

from torch.distributed.tensor import DTensor

from vescale.legacy.dtensor import random
from vescale.legacy.dtensor.comparison import allclose, equal
from vescale.legacy.dtensor.conversion import distribute_tensor, from_local, to_local
from vescale.legacy.dtensor.device_mesh import DeviceMesh, init_device_mesh
from vescale.legacy.dtensor.factory import arange, empty, full, ones, rand, randn, zeros
from vescale.legacy.dtensor.implicit import no_implicit_resharding
from vescale.legacy.dtensor.loss import loss_parallel
from vescale.legacy.dtensor.normalize import normalize_placements
from vescale.legacy.dtensor.placement_types import (
    InterleavedShard,
    Partial,
    Placement,
    Replicate,
    Shard,
)
from vescale.legacy.dtensor.redistribution import (
    redistribute_dtensor,
    vescale_all_gather,
    vescale_all_reduce,
    vescale_reduce_scatter,
)

__all__ = [
    "DTensor",
    "DeviceMesh",
    "InterleavedShard",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "allclose",
    "arange",
    "distribute_tensor",
    "empty",
    "equal",
    "from_local",
    "full",
    "init_device_mesh",
    "loss_parallel",
    "no_implicit_resharding",
    "normalize_placements",
    "ones",
    "rand",
    "randn",
    "random",
    "redistribute_dtensor",
    "to_local",
    "vescale_all_gather",
    "vescale_all_reduce",
    "vescale_reduce_scatter",
    "zeros",
]
