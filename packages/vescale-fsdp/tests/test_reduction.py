# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import Replicate

from testing.collectives import CountCollectives
from testing.models import batch, build, loss_of, reference_step
from testing.ranks import DEVICE
from vescale.dtensor import RaggedShard
from vescale.fsdp import (
    Elements,
    MixedPrecisionPolicy,
    Rows,
    Whole,
    clip_grad_norm_,
    fully_shard,
)
from vescale.fsdp.optim import Muon
from vescale.fsdp.reduction import ReduceOptions, Scaling, scaling_of
from vescale.fsdp.units import param_groups

STEPS = 3
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


def grid(replicas, shards):
    return init_device_mesh(DEVICE, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def wrapped(mesh, shard=fully_shard, seed=0, model=None, **options):
    model = build(seed).to(DEVICE) if model is None else model
    for layer in model.layers:
        shard(layer, mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


def fsdp2_ready():
    """FSDP2 refuses parameters without dims, and has no place for empty ones."""
    model = build(0).to(DEVICE)
    model.scale = nn.Parameter(torch.ones(1, device=DEVICE))
    model.nothing = nn.Parameter(torch.ones(1, device=DEVICE))
    return model


def full_gradients(model):
    return {
        n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()
    }


def assert_gradients(model, expected, **tolerance):
    got = full_gradients(model)
    for name, grad in expected.items():
        assert (grad is None) == (got[name] is None), name
        if grad is not None:
            torch.testing.assert_close(got[name], grad, **(tolerance or CLOSE), msg=name)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def check_training(rank, world_size, replicas, **options):
    """Train beside one process and beside FSDP2 on the same mesh."""
    mesh = grid(replicas, world_size // replicas)
    reference = fsdp2_ready()
    theirs = wrapped(mesh, fsdp2_fully_shard, model=copy.deepcopy(reference))
    ours = wrapped(mesh, model=copy.deepcopy(reference), **options)
    assert {p.placements[0] for p in ours.parameters()} == {Replicate()}
    assert all(isinstance(p.placements[1], RaggedShard) for p in ours.parameters())
    models = (ours, theirs, reference)
    optimizers = [adamw(model) for model in models]
    for step in range(STEPS):
        for model in (ours, theirs):
            loss = loss_of(model, batch(step, rank, DEVICE))
            loss.backward()
            clip = clip_grad_norm_ if model is ours and step else torch.nn.utils.clip_grad_norm_
            norm = clip(model.parameters(), 0.5)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            model.seen = loss.item(), norm.item()
        losses = reference_step(reference, step, world_size, DEVICE)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        reference.seen = losses[rank], norm.item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(ours.seen, theirs.seen, **CLOSE)
        torch.testing.assert_close(ours.seen, reference.seen, **CLOSE)
    expected = reference.state_dict()
    for name, value in ours.state_dict().items():
        if name == "nothing":  # a shift of all logits: its gradient is noise around zero
            continue
        torch.testing.assert_close(value.full_tensor(), expected[name], **CLOSE, msg=name)


def accumulate(model, rank, flags, set_flag, micro_batches=3):
    """Return the collectives of a few micro-batches, ``flags`` for each of them."""
    with CountCollectives() as counter:
        for step in range(micro_batches):
            set_flag(model, flags[step])
            loss_of(model, batch(step, rank, DEVICE)).backward()
    return counter.counts


def check_accumulation(rank, world_size, replicas):
    mesh = grid(replicas, world_size // replicas)
    reference = fsdp2_ready()
    for step in range(3):
        reference_step(reference, step, world_size, DEVICE)
    expected = {name: param.grad for name, param in reference.named_parameters()}
    reference.zero_grad()
    setters = {
        "set_requires_all_reduce": (3, 1),
        "set_requires_gradient_sync": (1, 1),
    }
    for setter, (scatters, all_reduces) in setters.items():
        for shard in (fully_shard, fsdp2_fully_shard):
            model = shard(copy.deepcopy(reference), mesh=mesh)
            flags = (False, False, True)
            counts = accumulate(model, rank, flags, lambda m, f, s=setter: getattr(m, s)(f))
            where = setter, shard.__module__
            if shard is fully_shard or world_size // replicas > 1:
                made = counts["reduce_scatter_base"] + counts["alltoall_base"]  # ours on gloo
                assert made == scatters * (world_size > replicas), where
            if replicas > 1:
                assert counts["allreduce"] == all_reduces, where
            assert_gradients(model, expected)
    # By default every micro-batch is reduced over the replicas, as in FSDP2.
    model = fully_shard(copy.deepcopy(reference), mesh=mesh)
    counts = accumulate(model, rank, (True,) * 3, lambda m, f: None)
    assert counts["allreduce"] == 3 * (replicas > 1)
    assert_gradients(model, expected)
    # With one unit for each block, and what was put off brought on without a use of most of them.
    model = wrapped(mesh, model=copy.deepcopy(reference))
    accumulate(model, rank, (False,) * 3, lambda m, f: m.set_requires_all_reduce(f))
    assert all(param.grad is None for param in model.parameters())
    with pytest.raises(RuntimeError, match="no backward has reduced yet"):
        model.double()
    model.set_requires_all_reduce(True)
    (model.layers[0](torch.ones(1, 13, device=DEVICE)).sum() * 0).backward()
    for name, grad in expected.items():
        if name.startswith("layers.0"):
            torch.testing.assert_close(
                model.get_parameter(name).grad.full_tensor(), grad, **CLOSE, msg=name
            )
    (model(batch(0, rank, DEVICE)).sum() * 0).backward()
    assert_gradients(model, expected)
    # An iteration that is dropped takes what was put off along.
    model.zero_grad()
    accumulate(model, rank, (False,) * 3, lambda m, f: m.set_requires_all_reduce(f))
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    (model(batch(0, rank, DEVICE)).sum() * 0).backward()
    assert all(not param.grad.full_tensor().any() for param in model.parameters())


def check_by_hand(rank, world_size, replicas):
    """``reduce_gradients`` brings in what waits, whatever it waits for, and nothing twice."""
    mesh = grid(replicas, world_size // replicas)
    reference = fsdp2_ready()
    models = [wrapped(mesh, model=copy.deepcopy(reference)) for _ in range(2)]
    for step in range(3):
        reference_step(reference, step, world_size, DEVICE)
    expected = {name: param.grad for name, param in reference.named_parameters()}
    setters = ("set_requires_all_reduce", "set_requires_gradient_sync")
    for model, setter in zip(models, setters, strict=True):
        model.reduce_gradients()
        accumulate(model, rank, (False,) * 3, lambda m, f, s=setter: getattr(m, s)(f))
        assert all(param.grad is None for param in model.parameters())
        for _ in range(2):
            model.reduce_gradients()
            assert_gradients(model, expected)
        assert not any(g.reduce_options.all_reduce for g in param_groups(model))
    branches = fully_shard(Branches().to(DEVICE), mesh=mesh)
    branches.set_requires_gradient_sync(False)
    branches([1] if rank == world_size - 1 else []).backward()
    branches.reduce_gradients()
    grads = full_gradients(branches)
    assert [g is not None for g in grads.values()] == [True, True, False, False]
    handle = model.register_forward_hook(lambda *_: model.reduce_gradients())
    with pytest.raises(RuntimeError, match=r"inside of a forward or backward; call reduce_grad"):
        model(batch(0, rank, DEVICE))
    handle.remove()


class Branches(nn.Module):
    """Parameters of which each call uses some."""

    def __init__(self, count=4):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(5, 3)) for _ in range(count))

    def forward(self, used):
        return sum((self.weights[i].sum() * (i + 1) for i in used), self.weights[0].sum() * 0)


def check_unused(rank, world_size, replicas):
    """``.grad`` is None exactly where no rank used the parameter, in whichever micro-batch."""
    mesh = grid(replicas, world_size // replicas)
    model = fully_shard(Branches().to(DEVICE), mesh=mesh)
    model([1] if rank == world_size - 1 else []).backward()
    grads = full_gradients(model)
    assert [g is not None for g in grads.values()] == [True, True, False, False]
    assert torch.equal(grads["weights.1"], torch.full((5, 3), 2 / world_size, device=DEVICE))
    model.zero_grad()
    model.set_requires_all_reduce(False)
    model([3] if rank == 0 else []).backward()
    model([]).backward()
    model.set_requires_all_reduce(True)
    model([1] if rank == 0 else []).backward()
    grads = full_gradients(model)
    assert [g is not None for g in grads.values()] == [True, True, False, True]
    assert torch.equal(grads["weights.3"], torch.full((5, 3), 4 / world_size, device=DEVICE))


def check_put_off_in_low_precision(rank, world_size):
    """64 small gradients add up as if in float32 (row 50)."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = nn.Linear(16, 16, bias=False).to(DEVICE)
    fully_shard(model, mesh=grid(2, world_size // 2), mp_policy=policy)
    each = torch.full((1, 16), 1e-3, device=DEVICE)
    for step in range(64):
        model.set_requires_all_reduce(step == 63)
        model(each).sum().backward()
    expected = torch.full((16, 16), 64 * each[0, 0].bfloat16().item())
    torch.testing.assert_close(model.weight.grad.full_tensor().cpu(), expected, rtol=1e-4, atol=0)


def once(model, rank):
    model.zero_grad()
    loss_of(model, batch(0, rank, DEVICE)).backward()
    return full_gradients(model)


def check_factors(rank, world_size, replicas):
    mesh = grid(replicas, world_size // replicas)
    model = fully_shard(build(0).to(DEVICE), mesh=mesh)
    mean = once(model, rank)
    for force in (False, True):
        model.set_force_sum_reduction_for_comms(force)
        model.set_gradient_divide_factor(4 * world_size)
        once(model, rank)
        assert_gradients(model, {name: grad / 4 for name, grad in mean.items()})
        # The factor is that of each micro-batch.
        model.zero_grad()
        model.set_requires_all_reduce(False)
        loss_of(model, batch(0, rank, DEVICE)).backward()
        model.set_gradient_divide_factor(world_size)
        model.set_requires_all_reduce(True)
        loss_of(model, batch(0, rank, DEVICE)).backward()
        assert_gradients(model, {name: grad * 1.25 for name, grad in mean.items()})
    with pytest.raises(ValueError, match="divide factor is 0, expected a positive"):
        model.set_gradient_divide_factor(0)


def check_one_rank_factor(rank, world_size):
    """Also where nothing is sharded (row 58)."""
    # Every rank makes the groups of all.
    alone = [DeviceMesh(DEVICE, [one]) for one in range(world_size)][rank]
    for shard in (fully_shard, fsdp2_fully_shard):
        model = nn.Linear(3, 2, bias=False).to(DEVICE)
        shard(model, mesh=alone)
        model.set_gradient_divide_factor(4.0)
        model(torch.ones(1, 3, device=DEVICE)).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((2, 3), 0.25, device=DEVICE))


def check_float16(rank, world_size, replicas):
    """No partial sum leaves the range of float16, whatever the factor."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float16)
    for factor in (None, 1.0, 1e9):
        model = nn.Linear(4, 4, bias=False).to(DEVICE)
        fully_shard(model, mesh=grid(replicas, world_size // replicas), mp_policy=policy)
        if factor:
            model.set_gradient_divide_factor(factor)
        for deferred in (True, False):
            model.set_requires_all_reduce(not deferred)
            model(torch.full((1, 4), 60000.0, device=DEVICE)).sum().backward()
        expected = 2 * 60000.0 * world_size / (factor or world_size)
        got = model.weight.grad.full_tensor()
        torch.testing.assert_close(got, torch.full_like(got, expected), rtol=2e-3, atol=0)


def check_hook(rank, world_size, replicas):
    mesh = grid(replicas, world_size // replicas)
    model = fully_shard(build(0).to(DEVICE), mesh=mesh)
    mean = once(model, rank)
    seen = []
    model.set_all_reduce_hook(lambda flat: (seen.append(flat), flat.mul_(2)))
    once(model, rank)
    assert_gradients(model, {name: 2 * grad for name, grad in mean.items()})
    (group,) = param_groups(model)
    assert [flat.shape for flat in seen] == [(group.plan.shard_numel,)]
    with pytest.raises(ValueError, match="stream is given for a mesh with replicas"):
        model.set_all_reduce_hook(
            lambda flat: None, stream=torch.get_device_module(DEVICE).Stream()
        )
    with pytest.raises(TypeError, match="hook is a int"):
        model.set_all_reduce_hook(3)
    with pytest.raises(TypeError, match=r"stream is a object, expected a torch\.Stream"):
        model.set_all_reduce_hook(lambda flat: None, stream=object())
    model.set_all_reduce_hook(None)
    once(model, rank)
    assert_gradients(model, mean)
    # Replicas by hand: shard over one axis, and let the hook reduce over the other.
    model = fully_shard(build(0).to(DEVICE), mesh=mesh["shard"])
    replicas_group = mesh.get_group("replicate")

    def over_replicas(flat):
        dist.all_reduce(flat, group=replicas_group)
        flat.div_(replicas)

    stream = torch.get_device_module(DEVICE).Stream()
    model.set_all_reduce_hook(over_replicas, stream=stream)
    once(model, rank)
    assert_gradients(model, mean)
    branches = fully_shard(Branches().to(DEVICE), mesh=mesh["shard"])
    branches.set_all_reduce_hook(over_replicas)
    branches([1] if rank == 0 else []).backward()
    grads = full_gradients(branches)
    assert torch.equal(grads["weights.1"], torch.full((5, 3), 2 / world_size, device=DEVICE))


def check_saving(rank, world_size, replicas, folder):
    """Checkpoints of hybrid meshes load on others, copies train apart, plain tensors load."""
    mesh = grid(replicas, world_size // replicas)
    model = wrapped(mesh, granularity=Rows(3))
    optimizer = adamw(model)
    loss_of(model, batch(0, rank, DEVICE)).backward()
    optimizer.step()
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    dist.barrier()
    line = init_device_mesh(DEVICE, (world_size,))
    for other_mesh, options in (
        (line, {"granularity": Elements()}),
        (mesh, {"granularity": Whole()}),
    ):
        other = wrapped(other_mesh, seed=3, **options)
        loaded = {"model": other.state_dict()}
        dcp.load(loaded, checkpoint_id=folder)
        other.load_state_dict(loaded["model"])
        for name, value in other.state_dict().items():
            assert torch.equal(value.full_tensor(), state[name]), name
    plain = wrapped(mesh, seed=4)
    plain.load_state_dict(state)
    twin = copy.deepcopy(plain)
    for one in (plain, twin):
        for name, value in one.state_dict().items():
            assert torch.equal(value.full_tensor(), state[name]), name
    loss_of(twin, batch(1, rank, DEVICE)).backward()
    adamw(twin).step()
    assert twin.norm.weight.grad is not None
    assert plain.norm.weight.grad is None
    assert torch.equal(plain.norm.weight.full_tensor(), state["norm.weight"])


def check_muon(rank, world_size, replicas):
    """Muon's update of a hybrid mesh is that of one process."""
    mesh = grid(replicas, world_size // replicas)
    reference, model = build(0).to(DEVICE), wrapped(mesh)
    optimizers = [
        Muon([p for layer in m.layers for p in layer.parameters() if p.ndim == 2], lr=1e-2)
        for m in (model, reference)
    ]
    for step in range(STEPS):
        loss_of(model, batch(step, rank, DEVICE)).backward()
        reference_step(reference, step, world_size, DEVICE)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        reference.zero_grad()
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            param.full_tensor(), reference.get_parameter(name), rtol=1e-3, atol=1e-3, msg=name
        )


def check_loss_across_ranks(rank, world_size, replicas):
    """A loss of the outputs of all ranks, gathered differentiably (row 103)."""
    mesh = grid(replicas, world_size // replicas)
    reference, model = build(0).to(DEVICE), wrapped(mesh)

    def loss_of_outputs(outputs):
        flat = torch.cat([o.flatten(1) for o in outputs])
        return (flat @ flat.T).tanh().mean() + flat.square().mean()

    mine = model(batch(0, rank, DEVICE))
    # Every rank differentiates the same loss, and each gets the sum of what they send.
    (loss_of_outputs(differentiable.all_gather(mine))).backward()
    loss_of_outputs([reference(batch(0, r, DEVICE)) for r in range(world_size)]).backward()
    assert_gradients(model, {n: p.grad for n, p in reference.named_parameters()})


def check_wrapping_errors(rank, world_size, replicas):
    """One rank's mistake is everybody's, also across the replicas."""
    mesh = grid(replicas, world_size // replicas)
    for bad in (0, world_size - 1):

        def choose(fqn, param, bad=bad):
            return "nonsense" if rank == bad else Elements()

        with pytest.raises((RuntimeError, TypeError), match="nonsense"):
            fully_shard(nn.Linear(4, 4).to(DEVICE), mesh=mesh, granularity=choose)
        one = Rows(2) if rank == bad else Elements()
        with pytest.raises(RuntimeError, match=r"differ first at: .*(Rows|Elements)"):
            fully_shard(nn.Linear(4, 4).to(DEVICE), mesh=mesh, granularity=one)


def check_everything(rank, world_size, replicas, folder):
    check_training(rank, world_size, replicas)
    check_accumulation(rank, world_size, replicas)
    check_unused(rank, world_size, replicas)
    check_by_hand(rank, world_size, replicas)
    check_factors(rank, world_size, replicas)
    check_float16(rank, world_size, replicas)
    check_hook(rank, world_size, replicas)
    check_saving(rank, world_size, replicas, folder)
    if (replicas, world_size) == (2, 4):
        check_put_off_in_low_precision(rank, world_size)
        check_muon(rank, world_size, replicas)
        check_loss_across_ranks(rank, world_size, replicas)
        check_wrapping_errors(rank, world_size, replicas)
        check_one_rank_factor(rank, world_size)


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (1, 4), (4, 1), (2, 1), (1, 3)])
def test_hybrid_meshes_equal_one_process_and_fsdp2(run_ranks, tmp_path, replicas, shards):
    run_ranks(check_everything, replicas * shards, replicas, str(tmp_path), exact=True)


@pytest.mark.parametrize(
    ("options", "dtype", "average", "expected"),
    [
        ({}, torch.float32, False, Scaling(1.0, False, 0.125)),
        ({}, torch.float32, True, Scaling(1.0, True, 1.0)),
        ({"divide_factor": 8.0}, torch.bfloat16, True, Scaling(1.0, True, 1.0)),
        ({"divide_factor": 2.0}, torch.bfloat16, True, Scaling(1.0, False, 0.5)),
        ({"force_sum": True}, torch.float32, True, Scaling(1.0, False, 0.125)),
        ({}, torch.float16, True, Scaling(0.125, False, 1.0)),
        ({"divide_factor": 2.0}, torch.float16, True, Scaling(0.125, False, 4.0)),
    ],
)
def test_a_mean_is_made_of_factors_or_by_the_collectives(options, dtype, average, expected):
    assert scaling_of(ReduceOptions(**options), 8, dtype, average) == expected


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0 * 16 * 8).view(4, 16, 8))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_replicas_are_not_counted_where_a_parameter_is_cut(fake_group, rank):
    """Row 4: whole experts, each on one of the ranks that shard."""
    fake_group(8, rank)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    experts = fully_shard(Experts(), mesh=mesh, granularity=Rows(1))
    assert experts.weight.placements == (Replicate(), RaggedShard((0,), (1, 1, 1, 1)))
    assert torch.equal(
        experts.weight.local_block()[0], torch.arange(4.0 * 16 * 8).view(4, 16, 8)[rank % 4]
    )
