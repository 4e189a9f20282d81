# SPDX-License-Identifier: Apache-2.0
"""Dropout under fully_shard drops what one device drops of the whole batch."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from testing.ranks import DEVICE
from vescale.dtensor import Plan, parallelize, random
from vescale.fsdp import Elements, Rows, fully_shard

VOCAB, WIDTH, LENGTH, SAMPLES, STEPS = 17, 12, 5, 12, 20


class Model(nn.Module):
    """Attention of its own tensors, in another order of memory, and dropout everywhere."""

    def __init__(self, recompute=False):
        super().__init__()
        self.embed, self.recompute = nn.Embedding(VOCAB, WIDTH), recompute
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 3, 22, dropout=0.1, batch_first=True)
            for _ in range(2)
        )
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.drop(self.embed(tokens))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


def build(**options):
    torch.manual_seed(1)
    return Model(**options).double().to(DEVICE)


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=generator).to(DEVICE)


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum")


def masks_of(model):
    """Collect what every dropout keeps, of the first step."""
    found = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, args, out: found.append(out.detach() != 0))
    return found


def check_training(rank, world_size, granularity, sizes, recompute=False):
    mesh = init_device_mesh(DEVICE, (world_size,))
    mine = sizes or [SAMPLES // world_size] * world_size
    twin, model = build(), build(recompute=recompute)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, granularity=granularity)
    fully_shard(model, mesh=mesh, granularity=granularity)
    masks, twin_masks = masks_of(model), masks_of(twin)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    random.manual_seed(5)
    for step in range(STEPS):
        ids = tokens(step)
        state = torch.get_rng_state()
        with random.scope(mesh, sizes=sizes):
            loss = loss_of(model, ids.split(mine)[rank]) / ids.numel()
            after = torch.get_rng_state()
            (loss * world_size).backward()  # the mean over ranks, whose samples may differ
        total = loss.detach()
        dist.all_reduce(total)
        torch.set_rng_state(state)
        expected = loss_of(twin, ids) / ids.numel()
        assert torch.equal(torch.get_rng_state(), after) or DEVICE != "cpu"
        expected.backward()
        torch.testing.assert_close(total, expected.detach(), rtol=1e-10, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if recompute:  # recomputed forwards are seen too
            continue
        for mask, whole in zip(masks, twin_masks, strict=True):
            assert torch.equal(mask, whole.split(mine)[rank])
        assert len(masks) == 1 + 2 * 3
        masks.clear(), twin_masks.clear()
    random.set_mode("off")


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 9), nn.Linear(9, 6), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(self.drop(F.gelu(self.up(x)))))


def check_beside_tensor_parallelism(rank, world_size):
    """Two data parallel ranks of two tensor parallel ranks: parts of a part."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(2)
    twin = Feed().double().to(DEVICE)
    torch.manual_seed(2)
    plan = (
        Plan()
        .param(r"up\..*", Shard(0), mesh="tp")
        .param(r"down\.weight", Shard(1), mesh="tp")
        .input("", {"x": Replicate()}, mesh="tp")
        .output("down", Replicate(), mesh="tp")
        .output("", Replicate(), mesh="tp", local=True)
    )
    model = parallelize(Feed().double().to(DEVICE), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    x = torch.linspace(-1, 1, 8 * 6, dtype=torch.float64, device=DEVICE).view(8, 6)
    random.manual_seed(4)
    with random.scope(mesh["dp"]):
        out = model(x.chunk(2)[mesh.get_local_rank("dp")])
    out.square().mean().backward()
    random.manual_seed(4)
    whole = twin(x)
    whole.square().mean().backward()
    expected = whole.chunk(2)[mesh.get_local_rank("dp")]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-10, atol=1e-14)
    random.set_mode("off")


def check_all(rank, world_size):
    uneven = [[12], [7, 5], [3, 7, 2], [1, 4, 5, 2]][world_size - 1]
    check_training(rank, world_size, Elements(), None)
    check_training(rank, world_size, Rows(2), uneven)
    check_training(rank, world_size, Elements(), None, recompute=True)
    if world_size == 4:
        check_beside_tensor_parallelism(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_dropout_is_that_of_one_device_on_the_whole_batch(run_ranks, world_size):
    run_ranks(check_all, world_size, exact=True, limit=300)
