# SPDX-License-Identifier: Apache-2.0
"""Placements and specs by the import path of the first veScale.

New code imports placements from ``vescale.dtensor``; nothing else of ours imports this file.
"""

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale.dtensor._torch_compat import DTensorSpec, TensorMeta, _StridedShard
from vescale.dtensor.placement import RaggedShard, _StridedRaggedShard, is_ragged_shard

__all__ = [
    "DTensorSpec",
    "Partial",
    "Placement",
    "RaggedShard",
    "Replicate",
    "Shard",
    "TensorMeta",
    "_Partial",
    "_StridedRaggedShard",
    "_StridedShard",
    "is_ragged_shard",
]

_Partial = Partial
