# SPDX-License-Identifier: Apache-2.0
"""What users of vescale-fsdp write, for the type checker alone: ``nox -s types``.

An ignored error is one that a user must be told of: the checker complains of one that is none.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import vescale.fsdp
from vescale.fsdp import (
    Block,
    BlockScaled,
    CPUOffloadPolicy,
    Elements,
    FSDPModule,
    GradientReductionHandle,
    Granularity,
    InitReport,
    MixedPrecisionPolicy,
    Rows,
    UnshardHandle,
    Whole,
    clip_grad_norm_,
    fully_shard,
    granularity_for,
    init_empty,
    iter_full_parameters,
    load_full_state_dict,
    no_sync,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from vescale.fsdp.checkpoint import Checkpoint, CheckpointManager, Restored, save_safetensors
from vescale.fsdp.inspect import Diff, Layout, Location, diff, layout, record_step, where
from vescale.fsdp.optim import SOAP, AdamW8bit, Muon, split_params
from vescale.fsdp.state_dict import StateDictOptions, get_model_state_dict, set_state_dict


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def wrap(mesh: DeviceMesh) -> FSDPModule:
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh, granularity=Rows(4))
    assert_type(fully_shard(list(net.blocks), reshard_after_forward=False), list[FSDPModule])
    model = fully_shard(
        net,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        offload_policy=CPUOffloadPolicy(),
        granularity=lambda fqn, param: Whole() if fqn.endswith("bias") else Elements(),
        lanes="auto",
        gather_as=BlockScaled(torch.float8_e4m3fn),
    )
    fully_shard(net, reshard_after_forwards=True)  # type: ignore[call-overload]
    fully_shard(net, lanes="many")  # type: ignore[call-overload]
    return assert_type(model, FSDPModule)


def step(model: FSDPModule, x: torch.Tensor) -> None:
    # A wrapped module is a module, and what was mixed in.
    assert_type([*model.parameters()], list[nn.Parameter])
    model.forward(x)
    model.train().to(torch.bfloat16)
    assert_type(model.unshard(async_op=True), UnshardHandle | None)
    model.set_requires_gradient_sync(False)
    model.set_modules_to_forward_prefetch([model])
    model.set_reshard_after_backward("no")  # type: ignore[arg-type]
    model.set_manual_backward_finalization(True)
    assert_type(model.finalize_backward(async_op=True), GradientReductionHandle | None)
    with no_sync(model):
        model(x).sum().backward()
    assert_type(clip_grad_norm_(model.parameters(), 1.0), torch.Tensor)
    model.reshard(recurse=True)
    register_fsdp_forward_method(model, "generate")
    share_comm_ctx([model])


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = split_params(model)
    muon = Muon(matrices, lr=0.02, ns_steps=5, matrix_split=lambda fqn, shape: None)
    adamw = AdamW8bit(rest, betas=(0.9, 0.95), block=256)
    soap = SOAP([{"params": list(model.parameters()), "lr": 1e-3}])
    AdamW8bit(rest, block="32")  # type: ignore[arg-type]
    assert_type(muon.step(), float | None)
    return [muon, adamw, soap]


def checkpoints(model: FSDPModule, folder: Path) -> Checkpoint | None:
    manager = CheckpointManager(folder, keep_last=2)
    found = optimizers(model)
    manager.save(10, model, found)
    restored = assert_type(manager.load(model, found), Restored | None)
    if restored is not None:
        print(restored.checkpoint.step, restored.same_random)
    save_safetensors(model, folder / "model.safetensors")
    return manager.newest()


def states(model: FSDPModule, state: dict[str, Any]) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True)
    load_full_state_dict(model, state)
    set_state_dict(model, [], model_state_dict=state, optim_state_dict={}, options=options)
    return assert_type(get_model_state_dict(model, options=options), dict[str, Any])


def empty(mesh: DeviceMesh, granularity: Granularity) -> Iterator[tuple[str, torch.Tensor]]:
    with torch.device("meta"):
        net = fully_shard(Net(), mesh=mesh, granularity=granularity_for("muon"))
    assert_type(init_empty(net), InitReport)
    print(granularity, Block(1, 32))
    return iter_full_parameters(net)


def look(model: FSDPModule, other: nn.Module) -> None:
    seen = assert_type(layout(model), Layout)
    print(seen.summary(), [group.unit for group in seen.groups])
    assert_type(where(model, "blocks.0.weight"), Location)
    assert_type(diff(model, other), Diff)
    with record_step("trace.json"):
        model(torch.zeros(1, 8))


# A public module is an attribute of the package too; a name that is not there is an error.
opt: type[torch.optim.Optimizer] = vescale.fsdp.optim.Muon
vescale.fsdp.fuly_shard  # type: ignore[attr-defined]  # noqa: B018
