# SPDX-License-Identifier: Apache-2.0
"""The data-parallel mesh of one parameter group: which axis shards, and how many ranks average."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class DataMesh:
    """A mesh whose axis ``shard_axis`` cuts the parameters. Compared by its mesh and axes."""

    mesh: DeviceMesh
    shard_axis: int = 0

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The process group of this rank along the sharding axis."""
        return self.mesh.get_group(self.shard_axis)

    @property
    def ranks(self) -> int:
        """How many ranks a gradient is averaged over."""
        return self.mesh.size()
