# SPDX-License-Identifier: Apache-2.0
"""Full parameters that stay cut over a smaller world between forward and backward."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from testing.models import batch, build, loss_of, reference_step
from testing.ranks import DEVICE
from vescale.dtensor import RaggedShard
from vescale.fsdp import Elements, MixedPrecisionPolicy, Rows, Whole, fully_shard
from vescale.fsdp.data_mesh import DataMesh
from vescale.fsdp.units import param_groups, unit_of

STEPS = 3


def fsdp2_ready():
    """FSDP2 refuses parameters without dims, and has no place for empty ones."""
    model = build(0).to(DEVICE)
    model.scale = torch.nn.Parameter(torch.ones(1, device=DEVICE))
    model.nothing = torch.nn.Parameter(torch.ones(1, device=DEVICE))
    return model


def wrapped(model, shard, **options):
    for layer in model.layers:
        shard(layer, **options)
    return shard(model, **options)


def check_training(rank, world_size, mesh, granularity):
    reference = fsdp2_ready()
    theirs = wrapped(
        copy.deepcopy(reference), fsdp2_fully_shard, mesh=mesh, reshard_after_forward=2
    )
    ours = wrapped(
        copy.deepcopy(reference),
        fully_shard,
        mesh=mesh,
        reshard_after_forward=2,
        granularity=granularity,
    )
    models = (ours, theirs, reference)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for step in range(STEPS):
        losses = [loss_of(model, batch(step, rank, DEVICE)) for model in models[:2]]
        for group in param_groups(ours):
            assert group.weights.keeps
            assert not group.weights.has_full
        assert all(isinstance(p.placements[-1], RaggedShard) for p in ours.parameters())
        for loss in losses:
            loss.backward()
        assert not any(g.weights.keeps or g.weights.has_full for g in param_groups(ours))
        expected = reference_step(reference, step, world_size, DEVICE)[rank]
        for loss in losses:
            torch.testing.assert_close(loss.item(), expected, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # leaves something, which the next step must not use
            loss_of(ours, batch(step, rank, DEVICE))
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(
            value.full_tensor(), reference.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name
        )


def check_groups(rank, world_size):
    """Each gather in backward is between two neighbours; groups are made once."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    model = wrapped(build(0).to(DEVICE), fully_shard, mesh=mesh, reshard_after_forward=2)
    group = DataMesh(mesh).subgroup(2)
    assert dist.get_process_group_ranks(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert DataMesh(init_device_mesh(DEVICE, (world_size,))).subgroup(2) is group
    loss = loss_of(model, batch(0, rank, DEVICE))
    for weights in (g.weights for g in param_groups(model)):
        kept, collectives = weights._kept
        assert collectives.group is group
        assert kept.numel() == weights.plan.buffer_numel // 2
    # What was kept can be dropped by hand: backward gathers from all ranks then.
    layer = model.layers[0]
    layer.reshard()
    assert not unit_of(layer).groups[0].weights.keeps
    loss.backward()
    model.set_reshard_after_forward(True)
    loss_of(model, batch(0, rank, DEVICE))
    assert not any(g.weights.keeps for g in param_groups(model))


def check_casts(rank, world_size):
    """What is kept is in the dtype of the computation, and copies keep the setting."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    plain = wrapped(build(0).to(DEVICE), fully_shard, **options)
    model = copy.deepcopy(
        wrapped(build(0).to(DEVICE), fully_shard, reshard_after_forward=2, **options)
    )
    for one in (plain, model):
        one.loss = loss_of(one, batch(0, rank, DEVICE))
    assert all(g.weights._kept[0].dtype == torch.bfloat16 for g in param_groups(model))
    for one in (plain, model):
        one.loss.backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(
            parameter.grad.full_tensor(), model.get_parameter(name).grad.full_tensor()
        ), name


def check_everything(rank, world_size):
    for granularity in (None, Rows(3)):
        check_training(rank, world_size, init_device_mesh(DEVICE, (world_size,)), granularity)
    names = ("replicate", "shard")
    for shape, granularity in (((1, 4), Elements()), ((1, 4), Whole())):
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
        check_training(rank, world_size, mesh, granularity)
    check_groups(rank, world_size)
    check_casts(rank, world_size)


def test_a_copy_over_a_smaller_world_equals_fsdp2(run_ranks):
    run_ranks(check_everything, 4, exact=True)


def test_large_worlds_make_their_groups_once(fake_group):
    fake_group(64, 13)
    mesh = init_device_mesh("cpu", (4, 16), mesh_dim_names=("replicate", "shard"))
    model = wrapped(build(0), fully_shard, mesh=mesh, reshard_after_forward=8)
    group = param_groups(model)[0].data.subgroup(8)
    assert dist.get_process_group_ranks(group) == list(range(8, 16))
    assert all(g.data.subgroup(8) is group for g in param_groups(model))
