# SPDX-License-Identifier: Apache-2.0
"""Random programs of calls on a wrapped model, each held against an unsharded twin.

Every rank draws the same programs: hypothesis is derandomised, and the ranks agree after each rule
on whether it held, so that they also shrink a failure together.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from testing.models import VOCAB, batch, build
from testing.ranks import DEVICE
from vescale.fsdp import Elements, Rows, Whole, fully_shard, no_sync
from vescale.fsdp.param_group import State
from vescale.fsdp.units import find_unit, param_groups

LAYERS = 3
SEEDS = st.integers(0, 50)
UNITS = st.sampled_from(["root", *range(LAYERS)])


class Broken(Exception):
    """Raised on purpose, inside of a forward or a backward."""


def checkpointed(layer, reentrant):
    """Make ``layer`` recompute its inner modules in backward."""
    inner = layer.forward

    def forward(x):
        return checkpoint(inner, x, use_reentrant=reentrant)

    layer.forward = forward


def skippable(layer):
    """Let ``layer`` pass its input on while it is ``skipped``, and leave its parameters unused."""

    def pick(module, args, output):
        return args[0] if module.skipped else output

    layer.skipped = False
    layer.register_forward_hook(pick)


def meshes(world_size):
    """Return the meshes of a world, of one axis and of two, by (replicas, shards)."""
    pairs = [(n, world_size // n) for n in range(1, world_size + 1) if world_size % n == 0]
    return {None: None} | {pair: init_device_mesh(DEVICE, pair) for pair in pairs}


class Program(RuleBasedStateMachine):
    """The calls that a training script may make, in any order."""

    rank = world_size = 0
    meshes = None

    @initialize(
        shape=st.integers(0, 9),
        reshard=st.sampled_from([None, True, False, "some"]),
        granularity=st.sampled_from([None, Elements(), Rows(4), Whole()]),
        tied=st.booleans(),
        recompute=st.sampled_from([None, "inside", "outside"]),
        wrapped=st.sets(st.sampled_from(range(LAYERS))),
        together=st.booleans(),
        head=st.booleans(),
        lanes=st.sampled_from(["auto", 2, 3]),
    )
    def build(self, shape, reshard, granularity, tied, recompute, wrapped, together, head, lanes):
        shape = list(self.meshes)[shape % len(self.meshes)]
        mesh, shards = self.meshes[shape], shape[1] if shape else self.world_size
        if reshard == "some":
            reshard = 2 if shards % 2 == 0 else True
        self.twin = build(0, layers=LAYERS, tied=tied).to(DEVICE)
        self.model = build(0, layers=LAYERS, tied=tied).to(DEVICE)
        self.recompute = recompute
        if recompute == "inside":
            checkpointed(self.model.layers[0].up, reentrant=False)
        for model in (self.model, self.twin):
            for layer in model.layers:
                skippable(layer)
        options = {"mesh": mesh, "reshard_after_forward": reshard, "granularity": granularity}
        options["lanes"] = lanes
        layers = [self.model.layers[index] for index in sorted(wrapped)]
        if together and layers:
            fully_shard(layers, **options)
        else:
            for layer in layers:
                fully_shard(layer, **options)
        if head:
            fully_shard([self.model.norm, self.model.head], **options)
        fully_shard(self.model, **options)
        self.wrapped = wrapped
        self.pending = []  # (loss of ours, losses of the twin)
        self.sync = True
        self.optimizers()

    def optimizers(self):
        self.steps = [
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (self.model, self.twin)
        ]

    # --- comparing --------------------------------------------------------------------------

    def agree(self, check):
        """Run ``check`` here, and fail on every rank if it fails on one."""
        problem = None
        try:
            check()
        except AssertionError as error:
            problem = error
        flag = torch.tensor([problem is not None], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if problem is not None:
            raise problem
        assert not flag.item(), "it failed on another rank"

    @property
    def waiting(self):
        groups = param_groups(self.model)
        return any(group.reduction.waits or group.reduction.under_way for group in groups)

    @invariant()
    def equal_to_the_twin(self):
        if not hasattr(self, "model"):
            return
        waiting = self.waiting

        def compare():
            for name, param in self.twin.named_parameters():
                ours, part = self.sharded(name)
                torch.testing.assert_close(
                    ours.detach().to_local(), param.detach().flatten()[part], msg=name
                )
                if waiting:
                    continue
                assert (ours.grad is None) == (param.grad is None), f"{name}.grad"
                if ours.grad is not None:
                    torch.testing.assert_close(
                        ours.grad.to_local(), param.grad.flatten()[part], msg=f"{name}.grad"
                    )

        self.agree(compare)

    def sharded(self, name):
        """Return the sharded form, and which elements of the whole lie here.

        Through the groups: what a module holds may be a full parameter at the moment.
        """
        module, _, attribute = name.rpartition(".")
        place = self.model.get_submodule(module)
        for group in param_groups(self.model):
            for index, item in enumerate(group.managed):
                if any(ref() is place and attribute == key for ref, key in item.slots):
                    begin, _, numel = group.plan.local_range(index, group.weights.rank)
                    return item.sharded, slice(begin, begin + numel)
        raise AssertionError(f"{name} is managed by no unit")

    def unit(self, which):
        if which == "root" or which not in self.wrapped:
            return self.model
        return self.model.layers[which]

    # --- forward and backward ---------------------------------------------------------------

    def run(self, model, tokens):
        if self.recompute == "outside" and model is self.model:
            return checkpoint(model, tokens, use_reentrant=False)
        return model(tokens)

    @rule(
        seed=SEEDS,
        mode=st.sampled_from(["grad", "grad", "no_grad", "inference"]),
        skips=st.lists(st.sets(st.sampled_from(range(LAYERS))), min_size=4, max_size=4),
    )
    def forward(self, seed, mode, skips):
        if self.recompute == "outside":
            skips = [set()] * 4  # backward runs the hooks once more
        context = {
            "grad": contextlib.nullcontext,
            "no_grad": torch.no_grad,
            "inference": torch.inference_mode,
        }[mode]

        def loss(model, rank):
            tokens = batch(seed, rank, DEVICE)
            for index, layer in enumerate(model.layers):
                layer.skipped = index in skips[rank]
            return F.cross_entropy(self.run(model, tokens).flatten(0, 1), tokens.flatten())

        with context():
            ours = loss(self.model, self.rank)
            twins = [loss(self.twin, rank) for rank in range(self.world_size)]
        self.agree(lambda: torch.testing.assert_close(ours.detach(), twins[self.rank].detach()))
        if mode == "grad":
            self.pending.append((ours, twins))

    @rule(seed=SEEDS, index=st.integers(0, LAYERS - 1), order=st.sampled_from([1, 1, 2]))
    def block_alone(self, seed, index, order):
        """A part of the model by itself; ``order`` 2 differentiates its gradient."""

        def loss(model, rank):
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            x = torch.randn(3, 13, generator=generator).to(DEVICE).requires_grad_()
            model.layers[index].skipped = False
            value = model.layers[index](x).square().mean()
            if order == 2:
                (slope,) = torch.autograd.grad(value, x, create_graph=True)
                value = value + slope.square().sum()
            return value

        if index not in self.wrapped:
            return  # its parameters are sharded by the root, which does not run
        ours = loss(self.model, self.rank)
        twins = [loss(self.twin, rank) for rank in range(self.world_size)]
        self.agree(lambda: torch.testing.assert_close(ours.detach(), twins[self.rank].detach()))
        self.pending.append((ours, twins))

    @precondition(lambda self: self.pending)
    @rule(pick=st.integers(0, 9), retain=st.booleans(), sync=st.sampled_from([True, True, False]))
    def backward(self, pick, retain, sync):
        pick %= len(self.pending)
        ours, twins = self.pending[pick] if retain else self.pending.pop(pick)
        with contextlib.nullcontext() if sync else no_sync(self.model):
            ours.backward(retain_graph=retain)
        for loss in twins:
            (loss / self.world_size).backward(retain_graph=retain)

    @precondition(lambda self: len(self.pending) > 1)
    @rule()
    def backward_of_all_at_once(self):
        sum(ours for ours, _ in self.pending).backward()
        for _, twins in self.pending:
            for loss in twins:
                (loss / self.world_size).backward()
        self.pending.clear()

    @precondition(lambda self: self.pending)
    @rule()
    def forget(self):
        self.pending.pop()

    # --- what goes wrong --------------------------------------------------------------------

    @rule(seed=SEEDS, index=st.integers(0, LAYERS - 1))
    def broken_forward(self, seed, index):
        def fail(*_):
            raise Broken

        for layer in self.model.layers:
            layer.skipped = False
        handle = self.model.layers[index].down.register_forward_pre_hook(fail)
        with pytest.raises(Broken):
            self.model(batch(seed, self.rank, DEVICE))
        handle.remove()

    @precondition(lambda self: not self.waiting)
    @rule(seed=SEEDS, index=st.integers(0, LAYERS - 1), reset=st.booleans())
    def broken_backward(self, seed, index, reset):
        def fail(_):
            raise Broken

        def spoil(module, args, output):
            output.register_hook(fail)

        self.zero_grad(True)
        for layer in self.model.layers:
            layer.skipped = False
        handle = self.model.layers[index].down.register_forward_hook(spoil)
        loss = self.model(batch(seed, self.rank, DEVICE)).float().sum()
        handle.remove()
        with pytest.raises(Broken):
            loss.backward()
        if reset:
            self.model.reset_iter_state()
            self.pending.clear()
        else:  # the next forward notices
            with torch.no_grad():
                self.model(batch(seed, self.rank, DEVICE))
        self.zero_grad(True)

    # --- between iterations -----------------------------------------------------------------

    @precondition(lambda self: not self.waiting)
    @rule(to_none=st.booleans())
    def zero_grad(self, to_none):
        self.model.zero_grad(set_to_none=to_none)
        self.twin.zero_grad(set_to_none=to_none)

    @precondition(lambda self: not self.waiting)
    @rule()
    def step(self):
        self.pending.clear()
        for optimizer in self.steps:
            optimizer.step()

    @rule(sync=st.booleans())
    def set_sync(self, sync):
        self.model.set_requires_gradient_sync(sync)

    @rule(all_reduce=st.booleans())
    def set_all_reduce(self, all_reduce):
        self.model.set_requires_all_reduce(all_reduce)

    @rule(last=st.booleans())
    def set_is_last_backward(self, last):
        self.model.set_is_last_backward(last)

    @rule(count=st.integers(1, 3))
    def set_reductions_in_flight(self, count):
        self.model.set_reduce_scatter_max_input_buffers(count)

    @rule(which=UNITS, ahead=st.lists(UNITS, max_size=2), backward=st.booleans())
    def set_prefetch(self, which, ahead, backward):
        unit, others = self.unit(which), [self.unit(each) for each in ahead]
        if backward:
            unit.set_modules_to_backward_prefetch(others)
        else:
            unit.set_modules_to_forward_prefetch(others)

    @rule(which=UNITS, flag=st.booleans())
    def set_unshard_in_backward(self, which, flag):
        self.unit(which).set_unshard_in_backward(flag)

    @rule(which=UNITS, flag=st.booleans())
    def set_reshard_after_forward(self, which, flag):
        self.unit(which).set_reshard_after_forward(flag)

    @rule(which=UNITS, flag=st.booleans())
    def set_reshard_after_backward(self, which, flag):
        self.unit(which).set_reshard_after_backward(flag)

    @rule(which=UNITS, wait=st.booleans())
    def unshard(self, which, wait):
        handle = self.unit(which).unshard(async_op=True)
        if wait:
            handle.wait()

    @rule(which=UNITS)
    def reshard(self, which):
        self.unit(which).reshard()
        groups = find_unit(self.unit(which)).groups
        self.agree(lambda: self.all_sharded(groups))

    @staticmethod
    def all_sharded(groups):
        assert all(group.state is State.SHARDED for group in groups)

    @rule(scale=st.sampled_from([0.5, 2.0]))
    def save_and_load(self, scale):
        self.pending.clear()
        saved = {name: value.detach().clone() for name, value in self.twin.state_dict().items()}
        ours = self.model.state_dict()
        self.agree(lambda: self.same_keys(ours, saved))
        changed = {name: value * scale for name, value in saved.items()}
        self.twin.load_state_dict(changed)
        self.model.load_state_dict(changed)

    @staticmethod
    def same_keys(ours, theirs):
        assert list(ours) == list(theirs)
        assert not any(type(value) is torch.nn.Parameter for value in ours.values())

    @precondition(lambda self: not self.waiting and self.recompute != "inside")
    @rule()
    def copy(self):
        self.pending.clear()
        self.model, self.twin = copy.deepcopy(self.model), copy.deepcopy(self.twin)
        self.zero_grad(True)
        self.optimizers()


def check_programs(rank, world_size, examples):
    Program.rank, Program.world_size = rank, world_size
    Program.meshes = meshes(world_size)
    run_state_machine_as_test(
        Program,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        ),
    )


@pytest.mark.parametrize(("world_size", "examples"), [(1, 25), (2, 25), (3, 25), (4, 12)])
def test_any_program_of_calls_equals_the_twin(run_ranks, world_size, examples):
    run_ranks(check_programs, world_size, examples, limit=300)


def test_the_vocabulary_divides_by_no_world_size():
    assert all(VOCAB % ranks for ranks in (2, 3, 4))
