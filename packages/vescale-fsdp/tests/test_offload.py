# SPDX-License-Identifier: Apache-2.0
import copy
import functools
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from testing.models import Block, batch, build, loss_of, reference_step
from testing.ranks import DEVICE
from vescale.fsdp import (
    CPUOffloadPolicy,
    Elements,
    MixedPrecisionPolicy,
    OffloadPolicy,
    clip_grad_norm_,
    fully_shard,
    init_empty,
    load_full_state_dict,
    no_sync,
)
from vescale.fsdp.offload import check_home, check_offload, host_copies
from vescale.fsdp.units import param_groups

STEPS = 2
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
EXACT = {"rtol": 0, "atol": 0}


class LateCopies:
    """Stands in for copies to and from a device: nothing has arrived before it is waited for."""

    pin = False

    def __init__(self):
        self.waits = {"in": 0, "out": 0}

    def allocate(self, numel, dtype):
        return torch.empty(numel, dtype=dtype)

    @contextmanager
    def inward(self):
        yield

    def to_device(self, target, source):
        target.copy_(source)
        return _Arrival(lambda: None)

    def await_inward(self, event):
        self.waits["in"] += 1

    def to_host(self, source, receive):
        result, values = torch.full_like(source, float("nan")), source.clone()

        def arrive():
            self.waits["out"] += 1
            result.copy_(values)

        return result, _Arrival(arrive)

    def settle(self):
        pass


class _Arrival:
    def __init__(self, arrive):
        self._arrive = arrive

    def synchronize(self):
        self._arrive()


@contextmanager
def late_copies():
    """Take the way through copies on a CPU too."""
    copies = LateCopies()
    with mock.patch("vescale.fsdp.sharded_group.host_copies", return_value=copies):
        yield copies


def wrap(model, **options):
    mesh = every_rank()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@functools.cache
def every_rank():
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def made(**options):
    """Return a wrapped model that started where the model is built: on the CPU."""
    return wrap(build(tied=True, layers=1), **options)


def on_cpu(model):
    return all(p.to_local().device.type == "cpu" for p in model.parameters())


def full(model):
    return {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}


def train(model, rank, *, micro_batches=1, clip=None):
    """Train, and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss = loss_of(model, batch(10 * step + micro, rank, DEVICE))
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            clip(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_equal(ours, theirs, **tolerance):
    for name, value in full(theirs).items():
        torch.testing.assert_close(full(ours)[name], value, msg=name, **tolerance)


def check_numbers(rank, world_size):
    """Offloading changes no number."""
    for policy, pin, how in (
        (MixedPrecisionPolicy(), True, {"clip": clip_grad_norm_}),
        (HALF, False, {"micro_batches": 2}),
    ):
        plain = made(mp_policy=policy)
        expected = train(plain, rank, **how)
        model = made(mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=pin))
        assert on_cpu(model)
        assert train(model, rank, **how) == expected
        assert_equal(model, plain, **EXACT)


def check_stock(rank, world_size):
    """The numbers of FSDP2 with the same policy, in two backwards a step."""
    tolerance = EXACT if world_size <= 2 else {"rtol": 1e-5, "atol": 1e-6}
    offload = CPUOffloadPolicy(pin_memory=False)
    for policy in (MixedPrecisionPolicy(), HALF):
        trained = []
        for shard in (fully_shard, fsdp2_fully_shard):
            torch.manual_seed(0)
            model = nn.Sequential(Block(), Block())
            for part in (*model, model):
                shard(part, mesh=every_rank(), mp_policy=policy, offload_policy=offload)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            generator = torch.Generator().manual_seed(rank)
            losses = []
            for _ in range(STEPS):
                for _ in range(2):
                    x = torch.randn(4, 13, generator=generator).to(DEVICE)
                    loss = model(x).float().square().mean()
                    loss.backward()
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            trained.append((model, losses))
        (ours, losses), (theirs, stock_losses) = trained
        torch.testing.assert_close(losses, stock_losses, **tolerance)
        assert_equal(ours, theirs, **tolerance)


def check_late_copies(rank, world_size):
    """Whatever reads a gradient reads it after its copy has ended; hooks too."""
    for micro_batches, option in (
        (2, {}),
        (1, {"mp_policy": HALF, "granularity": Elements(), "reshard_after_forward": False}),
    ):
        plain = made(**option)
        expected = train(plain, rank, micro_batches=micro_batches)
        with late_copies() as copies:
            model = made(offload_policy=CPUOffloadPolicy(), **option)
        assert train(model, rank, micro_batches=micro_batches) == expected
        assert_equal(model, plain, **EXACT)
        assert copies.waits["in"]
        assert copies.waits["out"] == STEPS * micro_batches * len(param_groups(model))


def check_accumulation(rank, world_size):
    """Two backwards outside of no_sync add, and so do those inside and one outside."""
    for around in (late_copies, nullcontext):
        with around():
            once, twice, apart = (made(offload_policy=CPUOffloadPolicy()) for _ in range(3))
        tokens = batch(0, rank, DEVICE)
        loss_of(once, tokens).backward()
        for _ in range(2):
            loss_of(twice, tokens).backward()
        with no_sync(apart):
            loss_of(apart, tokens).backward()
        loss_of(apart, tokens).backward()
        for name, param in once.named_parameters():
            for other in (twice, apart):
                got = other.get_parameter(name).grad.full_tensor()
                expected = 2 * param.grad.full_tensor()
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=name)


def check_hooks(rank, world_size):
    """An optimizer in post-accumulate hooks is plain SGD; a gradient hook sees valid values."""
    rate = 0.1
    reference = build(layers=1).to(DEVICE)
    optimizer = torch.optim.SGD(reference.parameters(), lr=rate)
    with late_copies():
        model = wrap(build(layers=1), offload_policy=CPUOffloadPolicy())
    seen = []

    def step(param):
        assert param.grad.to_local().isfinite().all()
        with torch.no_grad():
            param -= rate * param.grad
        param.grad = None
        seen.append("step")

    def look(grad):
        assert grad.to_local().isfinite().all()
        seen.append("look")

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
        param.register_hook(look)
    for number in range(STEPS):
        loss_of(model, batch(number, rank, DEVICE)).backward()
        reference_step(reference, number, world_size, DEVICE)
        optimizer.step()
        optimizer.zero_grad()
    count = STEPS * len(list(model.parameters()))
    assert seen.count("step") == seen.count("look") == count
    for name, param in model.named_parameters():
        expected = reference.get_parameter(name).detach().cpu()
        torch.testing.assert_close(param.full_tensor().cpu(), expected, rtol=1e-4, atol=1e-5)


def check_life(rank, world_size, folder):
    """State dicts, copies, meta init, casts and a failed pass, as without offloading."""
    offload = {"offload_policy": CPUOffloadPolicy()}
    plain = made()
    values = full(plain)
    expected = train(plain, rank)
    for how in ("to_empty", "assign", "init_empty", "full"):
        with torch.device("meta"):
            model = build(seed=5, tied=True, layers=1)
        wrap(model, **offload)
        assert all(p.is_meta for p in model.parameters())
        if how == "to_empty":
            model.to_empty(device="cpu")
        if how == "init_empty":
            init_empty(model, init=lambda fqn, module: _fill(module))
        if how == "full":
            load_full_state_dict(model, values)
        else:
            model.load_state_dict(values, assign=how == "assign")
        assert on_cpu(model)
        assert train(model, rank) == expected, how
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    dist.barrier()
    other = made(**offload)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    assert_equal(other, model, **EXACT)
    # A copy is independent, and offloaded too.
    model.load_state_dict(values)
    twin = copy.deepcopy(model)
    assert train(model, rank) == expected
    assert on_cpu(twin)
    assert train(twin, rank) == expected
    # Casts and moves to where it is.
    model = made(**offload)
    model.to("cpu").double()
    assert on_cpu(model)
    train(model, rank)
    # A backward that raised is forgotten.
    model = made(**offload)
    handle = model.layers[0].up.weight.register_hook(_fail)
    with pytest.raises(RuntimeError, match="planted"):
        loss_of(model, batch(0, rank, DEVICE)).backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    assert train(model, rank) == expected


def _fill(module):
    for param in module.parameters(recurse=False):
        nn.init.zeros_(param)


def _fail(grad):
    raise RuntimeError("planted")


def check_one_rank_differs(rank, world_size):
    policy = CPUOffloadPolicy() if rank == 0 and world_size > 1 else OffloadPolicy()
    if world_size == 1:
        fully_shard(build(), offload_policy=policy)
        return
    with pytest.raises(RuntimeError, match="CPUOffloadPolicy"):
        fully_shard(build(), offload_policy=policy)


def check_all(rank, world_size, folder):
    check_numbers(rank, world_size)
    check_stock(rank, world_size)
    if DEVICE == "cpu":
        check_late_copies(rank, world_size)
        check_accumulation(rank, world_size)
        check_hooks(rank, world_size)
    check_life(rank, world_size, folder)
    check_one_rank_differs(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_offloading_changes_no_number(run_ranks, tmp_path, world_size):
    run_ranks(check_all, world_size, tmp_path / "checkpoint")


def test_wrong_policies_are_named():
    with pytest.raises(TypeError, match=r"offload_policy=True is a bool.*CPUOffloadPolicy\(\)"):
        check_offload(True)
    with pytest.raises(TypeError, match=r"expected an OffloadPolicy"):
        check_offload(CPUOffloadPolicy)
    with pytest.raises(TypeError, match=r"pin_memory=1 is a int, expected True or False"):
        check_offload(CPUOffloadPolicy(pin_memory=1))


def test_parameters_may_not_leave_the_cpu():
    policy, gpu = CPUOffloadPolicy(), torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match=r"'layers\.0'.*moved to cuda:0.*to\('cpu'\)"):
        check_home(policy, gpu, "layers.0")
    for home in ("cpu", "meta"):
        check_home(policy, torch.device(home), "")
    check_home(OffloadPolicy(), gpu, "")


def test_a_cpu_needs_no_copies_and_no_pinned_memory():
    assert host_copies(CPUOffloadPolicy(pin_memory=True), torch.device("cpu")) is None
    assert host_copies(OffloadPolicy(), torch.device("cuda", 0)) is None


def check_on_a_gpu(rank, world_size):
    plain = made()
    expected = train(plain, rank, micro_batches=2)
    for pin in (True, False):
        model = made(offload_policy=CPUOffloadPolicy(pin_memory=pin))
        assert all(g.weights.shard.is_pinned() == pin for g in param_groups(model))
        losses = train(model, rank, micro_batches=2)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        loss_of(model, batch(0, rank, DEVICE)).backward()
        assert all(p.grad.to_local().device.type == "cpu" for p in model.parameters())
        model.zero_grad()
        with pytest.raises(RuntimeError, match="keeps sharded parameters on the CPU"):
            model.to(DEVICE)
        model.to("cpu")
        with torch.no_grad():  # written right behind a forward that reads the shards
            model(batch(0, rank, DEVICE))
            for param in model.parameters():
                param.zero_()
        assert loss_of(model, batch(0, rank, DEVICE)).isfinite()


@pytest.mark.gpu
def test_shards_and_gradients_travel(run_ranks):
    run_ranks(check_on_a_gpu, 2)
