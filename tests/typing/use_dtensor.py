# SPDX-License-Identifier: Apache-2.0
"""What users of vescale-dtensor write, for the type checker alone: ``nox -s types``."""

from typing import assert_type

import torch
from torch import nn

from vescale.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Plan,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    is_ragged_shard,
    parallelize,
    redistribute_many,
    zeros,
)
from vescale.dtensor.debug import sharding_table
from vescale.dtensor.plan import Explanation, llama_tp_sp
from vescale.dtensor.random import manual_seed
from vescale.dtensor.state import full_state_dict


def tensors(mesh: DeviceMesh) -> DTensor:
    ragged: Placement = RaggedShard(dims=(0,), local_units=(1, 2))
    x = assert_type(distribute_tensor(torch.ones(6, 4), mesh, [ragged]), DTensor)
    distribute_tensor(torch.ones(6, 4), mesh, ["0"])  # type: ignore[list-item]
    y = assert_type(x.redistribute(placements=[Shard(0)]), DTensor)
    assert_type(y.to_local(), torch.Tensor)
    assert_type(y.full_tensor(), torch.Tensor)
    part = assert_type(DTensor.from_local(torch.ones(2), mesh, [Partial()]), DTensor)
    assert_type(redistribute_many([x, part], [[Replicate()], [Replicate()]]), list[DTensor])
    print(is_ragged_shard(ragged), sharding_table(x), full_state_dict({"x": x}))
    return assert_type(zeros(6, 4, device_mesh=mesh, placements=[ragged]), DTensor)


def plans(model: nn.Module) -> Explanation:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    manual_seed(0)
    plan = Plan().param(r"up\.weight", Shard(0)).output("up", Shard(-1), local=True)
    Plan().param(r"up\.weight", 0)  # type: ignore[arg-type]
    parallelize(model, mesh, plan)
    return assert_type(llama_tp_sp(), Plan).explain(model, mesh)
