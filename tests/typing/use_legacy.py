# SPDX-License-Identifier: Apache-2.0
"""What users of vescale-legacy write, for the type checker alone: ``nox -s types``."""

from typing import assert_type

import torch
import torch.distributed as dist
from torch import nn

import vescale.legacy
from vescale.legacy import (
    DeviceMesh,
    DistributedDataParallel,
    DistributedOptimizer,
    DTensor,
    InterleavedShard,
    Partial,
    Placement,
    PlacementsInterface,
    Replicate,
    Shard,
    distribute_tensor,
    from_local,
    parallelize_module,
    redistribute_dtensor,
    to_local,
)


def tensors(mesh: DeviceMesh) -> torch.Tensor:
    placements: list[Placement] = [Partial(dist.ReduceOp.SUM), InterleavedShard(0, 2), Replicate()]
    x = assert_type(distribute_tensor(torch.ones(4), mesh, placements), DTensor)
    y = assert_type(redistribute_dtensor(x, mesh, [Replicate()]), DTensor)
    part = from_local(torch.ones(2), mesh, [Shard(0)])
    InterleavedShard("0", 2)  # type: ignore[arg-type]
    return assert_type(to_local(part), torch.Tensor) + to_local(y)


def train(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"parameter": {"up.weight": [Shard(0)]}, "forward": {"input": [[Replicate()]]}}
    module = parallelize_module(model, mesh, plan)
    ddp = DistributedDataParallel(module, data_pg_or_device_mesh=mesh)
    inner = torch.optim.AdamW(ddp.parameters())
    optimizer = DistributedOptimizer(inner, models=[ddp])
    optimizer.zero_grad()
    optimizer.step()
    print(PlacementsInterface([Replicate()], defer_reshard=True))


version: str = vescale.legacy.__version__
vescale.legacy.distribute_tensors  # type: ignore[attr-defined]  # noqa: B018
