# SPDX-License-Identifier: Apache-2.0
"""A model by a plan against one process: values, gradients, dropout; and wrong plans."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import Plan, RaggedShard, parallelize, random
from vescale.dtensor.debug import CommDebugMode

VOCAB, WIDTH, STEPS = 18, 12, 20
R = Replicate()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)
        self.inner, self.outer = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x, *, scale=None):
        y = self.down(self.inner(F.gelu(self.up(self.norm(x)))))
        return x + self.outer(y if scale is None else y * scale)


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tp(*, sequence=False, mesh="tp"):
    between = Shard(1) if sequence else R
    plan = (
        Plan()
        .param(r"(embed|head)\.weight", Shard(0), mesh=mesh)
        .param(r"blocks\.\d+\.up\..*", Shard(0), mesh=mesh)
        .param(r"blocks\.\d+\.down\.weight", Shard(1), mesh=mesh)
        .input(r"embed", {0: R}, mesh=mesh)
        .output(r"embed|blocks\.\d+\.down", between, mesh=mesh)
        .output(r"head", R, mesh=mesh, local=True)
    )
    if sequence:
        plan.output(r"blocks\.\d+\.norm", R, mesh=mesh).input("head", {"input": R}, mesh=mesh)
    return plan


def build(**options):
    torch.manual_seed(1)
    return Model(**options).double().to(DEVICE)


def tokens(step, rows=4):
    g = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (rows, 6), generator=g).to(DEVICE)


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def masks_of(model):
    """Collect what every dropout keeps."""
    found = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, args, out: found.append(out.detach() != 0))
    return found


def check_training(rank, world_size):
    """20 steps with dropout, tensor and data parallel: masks and losses of one process."""
    line = init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("tp",))
    cases = [(line, tp()), (line, tp(sequence=True))]
    if world_size == 2:
        cases.append((init_device_mesh(DEVICE, (2,), mesh_dim_names=("dp",)), None))
    if world_size == 4:
        square = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
        cases = [(square, tp(sequence=True).input("embed", {"input": Shard(0)}, mesh="dp"))]
    for mesh, plan in cases:
        dp = mesh.size(0) if mesh.mesh_dim_names[0] == "dp" else 1
        mine = mesh.get_local_rank(0) if dp > 1 else 0
        if plan is None:
            plan = Plan().input("embed", {0: Shard(0)}).output("head", Shard(0), local=True)
        twin, model = build(), parallelize(build(), mesh, plan)
        masks, twin_masks = masks_of(model), masks_of(twin)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
        random.manual_seed(5)
        losses, expected = [], []
        steps = STEPS if world_size < 4 else 4
        for step in range(steps):
            ids = tokens(step)
            state = torch.get_rng_state()
            loss = loss_of(model, ids.chunk(dp)[mine])
            after = torch.get_rng_state()
            (loss / dp).backward()
            total = loss.detach() / (world_size if dp > 1 else 1)
            if dp > 1:
                dist.all_reduce(total)
            losses.append(total.item())
            torch.set_rng_state(state)
            whole = loss_of(twin, ids)
            assert torch.equal(torch.get_rng_state(), after) or DEVICE != "cpu"
            whole.backward()
            expected.append(whole.item())
            for (name, param), other in zip(
                twin.named_parameters(), model.parameters(), strict=True
            ):
                assert other.grad.placements == other.placements, name
                if step == 0:
                    grad = other.grad.full_tensor()
                    torch.testing.assert_close(grad, param.grad, rtol=1e-10, atol=1e-12)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
        assert len(masks) == len(twin_masks) == 4 * steps
        for mask, twin_mask in zip(masks, twin_masks, strict=True):
            assert torch.equal(mask.full_tensor(), twin_mask)
    random.set_mode("off")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_with_dropout_is_that_of_one_process(run_ranks, world_size):
    run_ranks(check_training, world_size, exact=True, limit=300)


def check_details(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
    # Values of rank 0; ties; attributes; meta stays meta; explain tells the placements.
    torch.manual_seed(rank)
    model = Model(tied=True)
    model.embed.weight.mark = "kept"
    table = tp().explain(copy.deepcopy(model))
    assert parallelize(model, mesh, tp()) is model
    assert model.head.weight is model.embed.weight
    assert model.head.weight.mark == "kept"
    assert type(model.head.weight.data) is TorchDTensor
    everyones = [None] * 2
    dist.all_gather_object(everyones, model.head.weight.full_tensor())
    assert torch.equal(everyones[0], everyones[1])
    rows = {row.name: row for row in table.rows}
    for name, param in model.named_parameters(remove_duplicate=False):
        assert rows[name].placements == param.placements
    with torch.device("meta"):
        model = parallelize(Model(), mesh, tp())
    assert model.head.weight.is_meta
    assert model.head.weight.placements == (Shard(0),)
    # Sums of several ranks are reduced together; or stay, where the plan says so.
    model = parallelize(build(), mesh, tp(sequence=True))
    loss = loss_of(model, tokens(0))
    with CommDebugMode() as mode:
        loss.backward()
    reduced = mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
    assert reduced <= 2, reduced  # seven gradients of norms and biases
    plan = tp(sequence=True).grad(r"blocks\.0\.norm\.weight", Partial())
    model = parallelize(build(), mesh, plan)
    loss_of(model, tokens(0)).backward()
    assert model.blocks[0].norm.weight.grad.placements == (Partial(),)
    loss_of(model, tokens(1)).backward()  # accumulates
    assert model.blocks[1].norm.weight.grad.placements == (R,)
    # A keyword argument, tuples, None, and a ragged parameter that is used as a whole.
    block = Block().double().eval()
    twin = copy.deepcopy(block)
    plan = Plan().input("", {"x": R, "scale": R}).output("", R, local=True)
    parallelize(block, mesh, plan)
    x, scale = torch.ones(3, WIDTH, dtype=torch.float64), torch.full((WIDTH,), 2.0).double()
    torch.testing.assert_close(block(x, scale=scale), twin(x, scale=scale))
    torch.testing.assert_close(block(x), twin(x))
    weight = nn.Linear(4, 4, bias=False)
    plan = Plan().param("weight", RaggedShard((0,), (1, 3)))
    assert parallelize(weight, mesh, plan).weight.to_local().numel() == (4, 12)[rank]
    # A DTensor of another mesh.
    other = init_device_mesh(DEVICE, (2, 1))
    x = TorchDTensor.from_local(x, other, [R, R])
    with pytest.raises(ValueError, match=r"input\('', .* got a DTensor on .*; pass one on that"):
        block(x)


def check_mistakes(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
    square = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("dp", "tp"))
    up = Plan().param(r"blocks\.\d+\.up\.weight", Shard(0), mesh="tp")
    for plan, match in (
        (Plan().param(r"block\.up", Shard(0)), r"param\('block.*matches no parameter; .*'embed"),
        (Plan().input(r"nothing", {0: R}), r"input\('nothing'.*matches no module"),
        (Plan().param("embed.weight", R, mesh="ep"), r"is for an axis 'ep'.*axes \('tp',\)"),
        (up.param(r".*up\.weight", Shard(1)), r"param\('\.\*up.* and param\('blocks.*keep one"),
        (Plan().param("embed.weight", Shard(2)), r"shape \(18, 12\), so no dim 2"),
        (Plan().input("head", {"tokens": R}), r"'head' has no argument 'tokens'; it has input"),
        (Plan().input("head", {3: R}), r"no argument 3"),
    ):
        model = build()
        with pytest.raises(ValueError, match=match):
            parallelize(model, mesh, plan)
        assert not any(isinstance(p, TorchDTensor) for p in model.parameters())
    with pytest.raises(ValueError, match="names no axis"):
        parallelize(build(), square, Plan().param("embed.weight", R))
    with pytest.raises(ValueError, match="have no names"):
        parallelize(build(), init_device_mesh(DEVICE, (2, 1)), Plan())
    with pytest.raises(ValueError, match="are one parameter, but the plan places them"):
        parallelize(
            build(tied=True), mesh, Plan().param("embed.weight", Shard(0)).param("head.weight", R)
        )
    with pytest.raises(ValueError, match=r"is a DTensor of .* already"):
        parallelize(parallelize(build(), mesh, Plan()), mesh, Plan())
    for error, call in (
        (TypeError, lambda: parallelize(mesh, build(), Plan())),
        (TypeError, lambda: parallelize(build(), Plan(), mesh)),
        (TypeError, lambda: parallelize(build(), mesh, {})),
        (TypeError, lambda: Plan().param("x", 0)),
        (TypeError, lambda: Plan().input("x", {1.5: R})),
        (ValueError, lambda: Plan().param("(", R)),
        (ValueError, lambda: Plan().param("x", Partial())),
    ):
        with pytest.raises(error):
            call()


def check_both(rank, world_size):
    check_mistakes(rank, world_size)
    check_details(rank, world_size)


def test_a_plan_is_checked_before_anything_changes(run_ranks):
    run_ranks(check_both, 2, exact=True)


def test_a_plan_is_explained_without_ranks():
    model = Model()
    table = tp(sequence=True).explain(model)
    lines = str(table).splitlines()
    assert lines[0].split() == ["name", "rule", "placements", "collective"]
    moves = {row.name: row.collective for row in table.rows}
    assert moves["embed ->"] == moves["blocks.1.down ->"] == "reduce-scatter"
    assert moves["head ->"] == "all-gather"
    assert "all-gather of a Shard" in moves["head <- input"]
    two = tp().input("embed", {"input": Shard(0)}, mesh="dp").explain(model, ("dp", "tp"))
    (row,) = (row for row in two.rows if row.name == "embed <- input")
    assert row.placements == (Shard(0), R)
    with pytest.raises(ValueError, match="matches no module"):
        Plan().output("x", R).explain(model)


class Odd(nn.Module):
    """Fewer rows than ranks, a parameter of no dims, one of no elements."""

    def __init__(self, dtype):
        super().__init__()
        self.up, self.down = nn.Linear(5, 2, dtype=dtype), nn.Linear(2, 5, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.nothing = nn.Parameter(torch.empty(0, 4, dtype=dtype))
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.down(F.gelu(self.up(x)))) * self.scale + self.nothing.sum()


def check_odd(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("tp",))
    plan = (
        Plan()
        .param(r"up\..*|nothing", Shard(0))
        .param(r"down\.weight", Shard(1))
        .input("", {"x": R})
        .output("down", R)
        .output("", R, local=True)
    )
    for dtype, rows, near in (
        (torch.float64, 3, 1e-12),
        (torch.float64, 0, 0),
        (torch.bfloat16, 3, 3e-2),
    ):
        torch.manual_seed(1)
        twin = Odd(dtype).to(DEVICE)
        model = parallelize(copy.deepcopy(twin), mesh, plan)
        x = torch.linspace(-1, 1, 5 * rows, device=DEVICE).view(rows, 5).to(dtype)
        outs, states = [], []
        for module in (model, twin):
            random.manual_seed(2)
            outs.append(module(x))
            states.append(torch.get_rng_state())
            outs[-1].square().sum().backward()
        assert torch.equal(*states)
        torch.testing.assert_close(*outs, rtol=near, atol=near)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad.placements == ours.placements
            grad = ours.grad.full_tensor()
            torch.testing.assert_close(grad, theirs.grad, rtol=near, atol=near)
    random.set_mode("off")


def test_ranks_without_rows_and_odd_parameters(run_ranks):
    run_ranks(check_odd, 3, exact=True)
