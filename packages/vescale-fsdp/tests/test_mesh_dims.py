# SPDX-License-Identifier: Apache-2.0
"""Axes of data parallelism picked from a larger mesh by name."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from testing.collectives import CountCollectives
from testing.models import batch, build, loss_of, reference_step
from testing.ranks import DEVICE
from vescale.dtensor import RaggedShard
from vescale.fsdp import DataParallelMeshDims, clip_grad_norm_, fully_shard
from vescale.fsdp.data_mesh import data_mesh_of
from vescale.fsdp.optim import Muon

CLOSE = {"rtol": 2e-5, "atol": 1e-6}
AXES = ("pod", "host", "local")


def grid(*shape, names=AXES):
    return init_device_mesh(DEVICE, shape, mesh_dim_names=names)


def wrapped(mesh, seed=0, **options):
    model = build(seed).to(DEVICE)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def check_training(rank, world_size, mesh, dims, placements, batches):
    """``batches``: from how many ranks, this one's being ``rank`` modulo it."""
    reference, model = build(0).to(DEVICE), wrapped(mesh, dp_mesh_dims=dims)
    assert [type(p) for p in model.norm.weight.placements] == placements
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for step in range(3):
        loss = loss_of(model, batch(step, rank % batches, DEVICE))
        loss.backward()
        losses = reference_step(reference, step, batches, DEVICE)
        torch.testing.assert_close(loss.item(), losses[rank % batches], **CLOSE)
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            clip = clip_grad_norm_ if m is model and step else torch.nn.utils.clip_grad_norm_
            clip(m.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        expected = reference.state_dict()[name]
        torch.testing.assert_close(value.full_tensor(), expected, **CLOSE, msg=name)


def check_picked_axes(rank, world_size):
    mesh = grid(1, 2, 2)
    hybrid, shard, whole = [Replicate, RaggedShard], [RaggedShard], [Replicate]
    for dims, placements, batches in (
        (DataParallelMeshDims(shard="local", replicate="host"), hybrid, 4),
        (DataParallelMeshDims(shard=("host", "local")), shard, 4),
        (DataParallelMeshDims(shard=("local", "host"), replicate="pod"), hybrid, 4),
        (DataParallelMeshDims(replicate=("pod", "host", "local")), whole, 4),
        (DataParallelMeshDims(shard="local"), shard, 2),  # the same twice: "host" is not data
        (DataParallelMeshDims(replicate="local"), whole, 2),
    ):
        check_training(rank, world_size, mesh, dims, placements, batches)


def check_replicas_only(rank, world_size, folder):
    """Whole parameters on every rank: only gradients travel, once for each unit."""
    mesh = grid(world_size, names=("ddp",))
    dims = DataParallelMeshDims(replicate="ddp")
    model = wrapped(mesh, dp_mesh_dims=dims)
    for agreed in (False, True):  # once, on the order of reductions
        model.zero_grad()
        with CountCollectives() as counter:
            loss_of(model, batch(0, rank, DEVICE)).backward()
        assert counter.counts.pop("allreduce") == 4
        assert counter.total == (not agreed), counter.counts
    weight = model.layers[0].up.weight
    assert weight.placements == (Replicate(),)
    assert weight.to_local().shape == weight.shape
    assert weight.grad.to_local().shape == weight.shape
    muon = Muon([p for layer in model.layers for p in layer.parameters() if p.ndim == 2], lr=1e-2)
    muon.step()
    # Micro-batches without communication, by either setter.
    reference = build(1).to(DEVICE)
    for step in range(3):
        reference_step(reference, step, world_size, DEVICE)
    for setter in ("set_requires_all_reduce", "set_requires_gradient_sync"):
        model = wrapped(mesh, seed=1, dp_mesh_dims=dims)
        with CountCollectives() as counter:
            for step in range(3):
                getattr(model, setter)(step == 2)
                loss_of(model, batch(step, rank, DEVICE)).backward()
        assert counter.counts.pop("allreduce") == 4
        assert counter.total == 1, counter.counts
        for name, parameter in model.named_parameters():
            grad = reference.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), grad, **CLOSE, msg=name)
    # Saving, copying, moving and loading.
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    dist.barrier()
    sharded = wrapped(mesh, seed=2)
    loaded = {"model": sharded.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    sharded.load_state_dict(loaded["model"])
    other = wrapped(mesh, seed=3, dp_mesh_dims=dims)
    other.load_state_dict(state)
    for one in (sharded, other, copy.deepcopy(model)):
        for name, value in one.state_dict().items():
            assert torch.equal(value.full_tensor(), state[name]), name
    model.zero_grad()
    model.double()
    model.float()
    loss_of(model, batch(0, rank, DEVICE)).backward()
    meta = build(0).to("meta")
    fully_shard(meta, mesh=mesh, dp_mesh_dims=dims)
    meta.to_empty(device=DEVICE)
    meta.load_state_dict(state)
    loss_of(meta, batch(0, rank, DEVICE)).backward()
    for name, parameter in meta.named_parameters():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(
            parameter.grad.full_tensor(), grad.full_tensor(), **CLOSE, msg=name
        )


class Linears(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def on_mesh(module, mesh, placements):
    for name, layer in module.named_children():
        weight = distribute_tensor(layer.weight.detach(), mesh, placements[name])
        layer.weight = nn.Parameter(weight)
    return module


def check_dtensors_on_the_whole_mesh(rank, world_size):
    """Parameters that are DTensors on all axes, as FSDP2 wants them, and equal gradients."""
    mesh = grid(2, 2, names=("dp", "tp"))
    placements = {"up": [Replicate(), Shard(0)], "down": [Replicate(), Shard(1)]}
    torch.manual_seed(0)
    plain = Linears().to(DEVICE)
    x = torch.randn(2, 4, 6, device=DEVICE)  # one for each data-parallel rank
    for axis in ("shard", "replicate"):
        ours, theirs = (on_mesh(copy.deepcopy(plain), mesh, placements) for _ in range(2))
        fully_shard(ours, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**{axis: "dp"}))
        models = [ours]
        if axis == "shard" and hasattr(fsdp2, "DataParallelMeshDims"):
            dims = fsdp2.DataParallelMeshDims(shard="dp")
            fsdp2.fully_shard(theirs, mesh=mesh, dp_mesh_dims=dims)
            models.append(theirs)
        reference = copy.deepcopy(plain)
        reference(x.flatten(0, 1)).square().sum().div(2).backward()
        for model in models:
            mine = x[mesh.get_local_rank("dp")]
            batch_ = DTensor.from_local(mine, mesh, [Shard(0), Replicate()], run_check=False)
            model(batch_).redistribute(placements=[Shard(0), Replicate()]).square().sum().backward()
            for name, parameter in model.named_parameters():
                expected = reference.get_parameter(name)
                torch.testing.assert_close(parameter.full_tensor(), expected, **CLOSE)
                torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, **CLOSE)
    wrong = on_mesh(copy.deepcopy(plain), mesh, {"up": [Shard(0)] * 2, "down": [Shard(0)] * 2})
    with pytest.raises(ValueError, match=r"up\.weight .* axis 'dp' .* expected Replicate"):
        fully_shard(wrong, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def check_everything(rank, world_size, folder):
    check_picked_axes(rank, world_size)
    check_replicas_only(rank, world_size, folder)
    check_dtensors_on_the_whole_mesh(rank, world_size)


def test_picked_axes_equal_one_process_and_fsdp2(run_ranks, tmp_path):
    run_ranks(check_everything, 4, str(tmp_path), exact=True)


def test_axes_that_a_mesh_does_not_have_are_refused(fake_group):
    fake_group(8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=AXES)
    for dims in (
        DataParallelMeshDims(shard="tp"),
        DataParallelMeshDims(shard=("host", "local"), replicate="host"),
    ):
        with pytest.raises(ValueError, match="name axes that it has, each once"):
            fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match=r"axes \(\)"):
        fully_shard(nn.Linear(4, 4), dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    with pytest.raises(ValueError, match=r"3 axes .* dp_mesh_dims"):
        fully_shard(nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(TypeError, match="dp_mesh_dims is a str"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims="host")
    both = data_mesh_of(mesh, DataParallelMeshDims(shard="local", replicate=("pod", "host")))
    assert (both.replicas, both.shards, both.names) == (4, 2, ("pod", "host", "local"))
