# SPDX-License-Identifier: Apache-2.0
"""A plan on one axis, fully_shard on another: weights and training of one process."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from testing.models import LanguageModel, batch, build, loss_of
from testing.ranks import DEVICE
from vescale.dtensor import Plan, is_ragged_shard, parallelize, random
from vescale.fsdp import Elements, Rows, Whole, clip_grad_norm_, fully_shard, init_empty

R = Replicate()


def plan():
    return (
        Plan()
        .param(r"layers\.\d+\.up\..*", Shard(0), mesh="tp")
        .param(r"layers\.\d+\.down\.weight", Shard(1), mesh="tp")
        .input(r"embed", {0: R}, mesh="tp")
        .output(r"layers\.\d+\.down", R, mesh="tp")
    )


def shard(model, mesh, granularity):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, granularity=granularity)
    return fully_shard(model, mesh=mesh, granularity=granularity)


def by_kind(fqn, param):
    return Whole() if fqn.endswith("bias") else Elements()


def check_weights(rank, world_size):
    """Meta, plan, fully_shard, then reset_parameters on the shards themselves, or init_empty."""
    torch.manual_seed(0)
    expected, state = LanguageModel(), torch.get_rng_state()
    expected = dict(expected.named_parameters())
    line = init_device_mesh("cpu", (world_size,))
    meshes = [(line, None)]
    if world_size == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meshes += [(square["dp"], square["tp"]), (square, None)]
    for mesh, tp in meshes:
        for granularity in (Rows(2), Elements(), by_kind):
            for empty in (False, True):
                with torch.device("meta"):
                    model = LanguageModel()
                if tp is not None:
                    parallelize(model, tp, plan())
                shard(model, mesh, granularity)
                random.manual_seed(0)
                if empty:
                    init_empty(model, "cpu", strict=False)
                else:
                    model.to_empty(device="cpu")
                    for module in model.modules():
                        if hasattr(module, "reset_parameters"):
                            module.reset_parameters()
                assert torch.equal(torch.get_rng_state(), state)
                for name, param in model.named_parameters():
                    assert is_ragged_shard(param.placements[mesh.ndim - 1])
                    if name != "scale":
                        assert torch.equal(param.full_tensor(), expected[name]), name
    random.set_mode("off")


def check_training(rank, world_size):
    """Two batches on two data ranks, each by two tensor-parallel ranks."""
    mesh = init_device_mesh(DEVICE, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model, twin = build().double().to(DEVICE), build().double().to(DEVICE)
    rules = plan().output("", R, mesh="tp", local=True)
    shard(parallelize(model, mesh["tp"], rules), mesh["dp"], Rows(1))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    for step in range(4):
        mine = mesh.get_local_rank("dp")
        loss = loss_of(model, batch(step, mine, DEVICE))
        loss.backward()
        expected = [loss_of(twin, batch(step, r, DEVICE)) for r in range(world_size // 2)]
        (sum(expected) / len(expected)).backward()
        torch.testing.assert_close(loss, expected[mine], rtol=1e-6, atol=0)  # logits are cast
        norm = clip_grad_norm_(model, 0.1)
        twin_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        torch.testing.assert_close(norm, twin_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor(), param, msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shards_are_reset_to_the_weights_of_one_process(run_ranks, world_size):
    run_ranks(check_weights, world_size, exact=True, limit=240)


@pytest.mark.parametrize("world_size", [2, 4])
def test_training_by_a_plan_is_that_of_one_process(run_ranks, world_size):
    run_ranks(check_training, world_size, exact=True, limit=240)
