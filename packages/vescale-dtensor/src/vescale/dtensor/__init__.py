# SPDX-License-Identifier: Apache-2.0
"""RaggedShard: a DTensor placement that cuts a tensor's memory at any block, in any proportion."""

import vescale.dtensor._shadow  # noqa: F401  first: refuses to load beside the old `vescale`

# isort: split
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale.dtensor._torch_compat import (
    DTensorSpec,
    TensorMeta,
    _StridedShard,
    enable_foreach,
    enable_subclass_dispatch,
)
from vescale.dtensor.factory import distribute_tensor, empty, full, ones, rand, randn, zeros
from vescale.dtensor.many import redistribute_many
from vescale.dtensor.placement import (
    RaggedShard,
    _StridedRaggedShard,
    is_ragged_shard,
    rebuild_ragged_shard,
)
from vescale.dtensor.plan import Plan, parallelize
from vescale.dtensor.tensor import DTensor

__all__ = [
    "DTensor",
    "DTensorSpec",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Plan",
    "RaggedShard",
    "Replicate",
    "Shard",
    "TensorMeta",
    "_Partial",
    "_StridedRaggedShard",
    "_StridedShard",
    "distribute_tensor",
    "empty",
    "full",
    "init_device_mesh",
    "is_ragged_shard",
    "ones",
    "parallelize",
    "rand",
    "randn",
    "redistribute_many",
    "zeros",
]

_Partial = Partial  # upstream's name

# Registrations that torch offers; nothing of torch is replaced.
torch.serialization.add_safe_globals(
    [DTensor, RaggedShard, _StridedRaggedShard, rebuild_ragged_shard]
)
enable_foreach(DTensor)
_dispatch_rules = enable_subclass_dispatch(DTensor)  # the rules live as long as this
