# SPDX-License-Identifier: Apache-2.0
"""Rows 91 and 92 of the project's list of cases are checked here."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard, distribute_tensor

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import Elements, Rows, Whole, fully_shard, init_empty

META = torch.device("meta")


def table_of(width):
    return 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)


class Rotary(nn.Module):
    """Its buffer comes from __init__, and nothing re-runs that."""

    def __init__(self, width=6):
        super().__init__()
        self.register_buffer("inv_freq", table_of(width), persistent=False)


class RotaryWithReset(Rotary):
    """Assigns a new buffer, as many do."""

    def reset_parameters(self):
        self.inv_freq = table_of(2 * self.inv_freq.numel())


class Experts(nn.Module):
    """A fused parameter that draws through .data, a bias that nobody initialises but init."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 5, 6))
        self.reset_parameters()

    def reset_parameters(self):
        self.weight.data.normal_(std=0.02)


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 6))


class ResetsChildren(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Bilinear()
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.xavier_uniform_(self.inner.weight)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 2, 11, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.experts = Experts()
        self.rotary = RotaryWithReset()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(6, 3)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = x + self.rotary.inv_freq.sum()
        x = self.norm(x.flatten(0, 1)).view_as(x) @ self.experts.weight.sum(0).t()[:, :5]
        return self.last(nn.functional.pad(x, (0, 1))) @ self.head.weight[:, :3].t()


class Bare(nn.Module):
    """Parameters and buffers without any method that writes them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(5))
        self.rotary = Rotary()
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))
        self.again = self.scale

    def forward(self, x):
        return self.linear(x) * self.scale[:4]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, TorchDTensor) else tensor


def on_meta(make):
    with META:
        return make()


def in_one_process(make, seed):
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        return make()


def equal(model, expected):
    theirs = dict((*expected.named_parameters(), *expected.named_buffers()))
    ours = dict((*model.named_parameters(), *model.named_buffers()))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(whole(tensor), theirs[name]), name


def by_kind(fqn, param):
    return Whole() if fqn.endswith("bias") else Elements()


def check_equal_to_one_process(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    expected = in_one_process(Model, seed=4)
    after = torch.rand(3, device=DEVICE)
    for shard, options in (
        (fully_shard, {"granularity": by_kind}),
        (fully_shard, {"granularity": Rows(2)}),
        (fsdp2_fully_shard, {}),
        (None, {}),
    ):
        model = on_meta(Model)
        if shard is fsdp2_fully_shard:  # does not serve the tie
            model.head.weight = nn.Parameter(torch.empty_like(model.head.weight))
        if shard is not None:
            for layer in model.layers:
                shard(layer, mesh=mesh, **options)
            shard(model, mesh=mesh, **options)
        params = dict(model.named_parameters())
        torch.manual_seed(4)
        report = init_empty(model, DEVICE)
        assert report.uninitialised == []
        names = (*expected.named_parameters(), *expected.named_buffers())
        tied = {"head.weight"} if shard is fsdp2_fully_shard else set()
        assert set(report.initialised) == {name for name, _ in names} | tied
        assert torch.equal(torch.rand(3, device=DEVICE), after)  # draws go on as in one process
        if shard is fsdp2_fully_shard:
            model.head.weight = model.embed.weight
        equal(model, expected)
        if shard is fully_shard:
            assert all(params[name] is param for name, param in model.named_parameters())
            assert model.head.weight is model.embed.weight
        model.requires_grad_(True)
        tokens = batch(0, 0, DEVICE) % 7
        if shard is not fsdp2_fully_shard:
            torch.testing.assert_close(model(tokens), expected(tokens))
            model(tokens).sum().backward()
            expected = in_one_process(Model, seed=4)
        assert init_empty(model, DEVICE) == ([], [])  # nothing is on meta any more
    # 0-dim and empty parameters, a tie across units; train right away.
    expected = build(tied=True, layers=1).to(DEVICE)
    model = on_meta(lambda: build(tied=True, layers=1))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(0)
    report = init_empty(model, init=write_scale)
    assert "nothing" in report.initialised
    if DEVICE == "cpu":
        equal(model, expected)
    loss_of(model, batch(0, rank, DEVICE)).backward()


def write_scale(fqn, module):
    if "scale" in module._parameters:
        module.scale.fill_(1.0)


def check_what_nobody_initialises(rank, world_size):
    """A loud list, alike on all ranks; NaN and not garbage; a function helps."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    lost = ["scale", "count", "rotary.inv_freq"]
    for shard in (fully_shard, fsdp2_fully_shard, None):
        make = lambda shard=shard: (  # noqa: E731
            shard(on_meta(Bare), mesh=mesh) if shard else on_meta(Bare)
        )
        model = make()
        match = r"nothing initialised scale, count, rotary.inv_freq: .*Pass init="
        with pytest.raises(RuntimeError, match=match):
            init_empty(model, DEVICE)
        model = make()
        report = init_empty(model, DEVICE, strict=False)
        assert report == (["linear.weight", "linear.bias"], lost)
        assert repr(report).startswith(f"InitReport(2 initialised, {len(lost)} uninitialised: ")
        assert whole(model.scale).isnan().all()
        assert model.rotary.inv_freq.isnan().all()
        assert model.count.tolist() == [0, 0]
        assert whole(model.linear.weight).isfinite().all()
        everyone = [None] * world_size
        dist.all_gather_object(everyone, report)
        assert everyone == [report] * world_size

        def init(fqn, module):
            if isinstance(module, Rotary):
                module.inv_freq.copy_(table_of(6))
            if isinstance(module, Bare):
                assert type(module.scale) is nn.Parameter  # whole, wherever it is cut
                nn.init.constant_(module.scale.data, 3.0)
                module.count.fill_(1)
            if fqn == "linear":
                module.weight.data.fill_(2.0)
                module.bias.data.zero_()

        model = make()
        assert init_empty(model, DEVICE, init=init).uninitialised == []
        assert torch.equal(model.rotary.inv_freq, table_of(6).to(DEVICE))
        assert whole(model.scale).tolist() == [3.0] * 5
        assert model.again is model.scale
        assert whole(model.linear.weight).eq(2).all()  # reset_parameters() did not come after
    # What is real is left alone.
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")).to()
    kept = model[0].weight.detach().clone()
    model[0].bias = nn.Parameter(torch.empty(3, device="meta"))
    report = init_empty(model, "cpu", strict=False)
    assert report == (["1.weight", "1.bias"], ["0.bias"])
    assert torch.equal(model[0].weight, kept)


def check_seeds_and_errors(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    expected = in_one_process(lambda: nn.Linear(6, 5), seed=2)
    # Seeded apart, as for dropout: rank 0's numbers count, and ranks stay apart.
    model = on_meta(lambda: nn.Linear(6, 5))
    model.register_parameter("plain", nn.Parameter(torch.empty(2, device="meta")))
    fully_shard(model, mesh=mesh, ignored_params={model.plain})
    torch.manual_seed(2 + rank)
    own = torch.get_rng_state()
    init_empty(model, strict=False)
    assert torch.equal(torch.get_rng_state(), own) == (rank > 0) or DEVICE != "cpu"
    assert torch.equal(model.weight.full_tensor(), expected.weight)
    assert torch.equal(model.bias.full_tensor(), expected.bias)
    # Of two axes: the shards of every row are those of one process.
    if world_size == 4:
        square = init_device_mesh(DEVICE, (2, 2))
        placements = [Shard(0), Shard(1)]
        model = on_meta(lambda: nn.Linear(6, 5, bias=False))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), square, placements))
        torch.manual_seed(2 + rank)
        init_empty(model, DEVICE)
        assert torch.equal(model.weight.full_tensor(), expected.weight)

    # A module that resets those under it, which are torch's DTensors.
    expected = in_one_process(ResetsChildren, seed=2)
    model = on_meta(ResetsChildren)
    model.inner.weight = nn.Parameter(
        distribute_tensor(model.inner.weight.detach(), mesh, [Shard(0)])
    )
    torch.manual_seed(2)
    init_empty(model, DEVICE)
    equal(model, expected)

    def bad(fqn, module):
        if dist.get_rank() == world_size - 1:
            raise ArithmeticError("of the last rank alone")

    model = fully_shard(on_meta(lambda: nn.Linear(6, 5)), mesh=mesh)
    kind = ArithmeticError if rank == world_size - 1 else RuntimeError
    with pytest.raises(kind, match="of the last rank alone"):
        init_empty(model, init=bad)
    assert isinstance(model.weight, TorchDTensor)

    def reshape(fqn, module):
        module.weight = nn.Parameter(torch.ones(2, 2))

    for error, match, args, options in (
        (TypeError, "module is a dict", ({},), {}),
        (TypeError, "init is a int", (nn.Linear(2, 2), "cpu"), {"init": 3}),
        (ValueError, "no parameter is wrapped", (nn.Linear(2, 2),), {}),
        (ValueError, "device is meta", (nn.Linear(2, 2), "meta"), {}),
        (
            ValueError,
            r"weight was initialised with shape \(2, 2\)",
            (fully_shard(on_meta(lambda: nn.Linear(3, 2)), mesh=mesh),),
            {"init": reshape},
        ),
    ):
        with pytest.raises(error, match=match):
            init_empty(*args, **options)


def check_all(rank, world_size):
    check_equal_to_one_process(rank, world_size)
    check_what_nobody_initialises(rank, world_size)
    check_seeds_and_errors(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_meta_models_are_initialised_as_in_one_process(run_ranks, world_size):
    run_ranks(check_all, world_size)


def test_a_plain_model_needs_no_process_group():
    expected = in_one_process(Model, seed=6)
    model = on_meta(Model)
    torch.manual_seed(6)
    init_empty(model, DEVICE)
    equal(model, expected)
