# SPDX-License-Identifier: Apache-2.0
"""``main_grad`` is the mean gradient of one device, with tensor parallelism inside too."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from testing.ranks import DEVICE
from vescale.legacy.ddp import DistributedDataParallel as DDP
from vescale.legacy.dmodule import parallelize_module
from vescale.legacy.dtensor import DTensor, Replicate, Shard

R, S0, S1 = Replicate(), Shard(0), Shard(1)
PLAN = {
    "parameter": {"1.weight": [S0], "1.bias": [S0], "3.weight": [S1]},
    "forward": {"input": [[S1]], "1.input": [[R]], "3.output": [[S1]]},
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to(DEVICE)


def batch(place, step=0):
    return torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(9 * step + place)).to(
        DEVICE
    )


def whole(parameter, local):
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements).full_tensor()


def reference_gradients(ranks, steps=1):
    model = build()
    for place in range(ranks):
        for step in range(steps):
            (model(batch(place, step)).square().sum() / ranks).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_two_by_two(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("DP", "TP"))
    place, part = mesh.get_coordinate()
    expected = {steps: reference_gradients(2, steps) for steps in (1, 2)}
    for options, steps in (
        ({}, 1),
        ({"bucket_size": 10}, 1),
        ({"overlap_grad_reduce": False}, 2),
        ({"bucket_size": 10, "use_distributed_optimizer": True}, 1),
    ):
        model = parallelize_module(build(), mesh["TP"], PLAN)
        ddp = DDP(model, mesh["DP"] if steps == 1 else mesh.get_group("DP"), **options)
        for _ in range(2):  # again after zero_grad_buffer
            ddp.zero_grad_buffer()
            for step in range(steps):
                mine = batch(place, step).chunk(2, 1)[part].contiguous()
                ddp(mine).to_local().square().sum().backward()
            ddp.start_grad_sync()
            ddp.finish_grad_sync()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None
            if not ddp.use_distributed_optimizer:
                found = whole(parameter, parameter.main_grad)
                torch.testing.assert_close(found, expected[steps][name])
        [buffer] = ddp.grad_buffers.values()
        if ddp.use_distributed_optimizer:  # only the own part of each bucket is valid
            slots = ddp.grad_buffer_param_index_map[torch.float32]
            for index, (first, _) in enumerate(buffer.layout.buckets):
                own = buffer.buckets[index].own
                for name, parameter in model.named_parameters():
                    start, end, bucket = slots[parameter]
                    low, high = max(start, first + own.start), min(end, first + own.stop)
                    if bucket == index and low < high:
                        full = expected[1][name]
                        if parameter.placements != (R,):
                            full = full.chunk(2, parameter.placements[0].dim)[part]
                        flat = full.reshape(-1)[low - start : high - start]
                        torch.testing.assert_close(buffer.data[low:high], flat)


def test_data_and_tensor_parallel_gradients(run_ranks):
    run_ranks(check_two_by_two, 4, exact=True)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.tied = self.experts[0].weight

    def forward(self, x, which):
        return self.experts[which](x) @ self.tied


def check_unused(rank, world_size):
    torch.manual_seed(0)
    reference = Experts().to(DEVICE)
    model, inputs = copy.deepcopy(reference), [batch(place)[0] for place in range(world_size)]
    for place, x in enumerate(inputs):
        (reference(x, place).sum() / world_size).backward()
    for options in ({"bucket_size": 1}, {"bucket_size": 1, "module_to_enforce": [nn.Linear]}):
        ddp = DDP(copy.deepcopy(model), dist.group.WORLD, **options)
        ddp(inputs[rank], rank).sum().backward()
        if "module_to_enforce" in options:
            ddp.finish_grad_sync()
        else:
            with pytest.warns(UserWarning, match="no gradient arrived"):
                ddp.finish_grad_sync()
        for name, parameter in ddp.module.named_parameters():
            expected = reference.get_parameter(name).grad
            expected = torch.zeros_like(parameter) if expected is None else expected
            torch.testing.assert_close(parameter.main_grad, expected)
    with pytest.raises(AssertionError, match="Cannot set grad twice"):
        ddp(inputs[rank], rank).sum().backward()
    dist.barrier()


def test_ranks_may_use_different_parameters(run_ranks):
    run_ranks(check_unused, 2, exact=True)


def check_rest(rank, world_size):
    model = build().to(torch.bfloat16)
    ddp = DDP(
        model,
        dist.group.WORLD,
        False,
        param_to_ignore=["3.bias"],
        disable_bucketing=True,
        whitelist_module_types=(),
    )
    assert list(ddp.grad_buffers) == [torch.bfloat16]
    assert ddp.bucket_size is None
    assert ddp.data_parallel_ranks == list(range(world_size))
    assert ddp.data_parallel_world_size == world_size
    (ddp(batch(0).to(torch.bfloat16)).sum() * rank).backward()
    ddp.finish_grad_sync()
    assert model[3].bias.main_grad.unique().tolist() == [8.0 * rank]
    assert model[3].bias.grad is None
    state = ddp.state_dict()
    assert list(state) == list(model.state_dict()) == list(ddp.state_dict_for_save_checkpoint())
    ddp.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert not model[1].weight.any()
    with pytest.raises(ValueError, match="expected a ProcessGroup"):
        DDP(model, None)
    with pytest.raises(ValueError, match="no parameters"):
        DDP(model, dist.group.WORLD, param_to_ignore=["nothing"])


def test_dtypes_states_and_ignored_parameters(run_ranks):
    run_ranks(check_rest, 2)
