# SPDX-License-Identifier: Apache-2.0
"""A small GPT by the old veScale API: data, tensor and sequence parallel, with dropout.

    torchrun --standalone --nproc-per-node 4 examples/legacy_nanogpt_4d.py

Two data parallel groups of two tensor parallel ranks train for 20 iterations, and each rank trains
the same model in its own process by plain torch too. The losses must agree to 1e-5, and the dropout
masks of the first iteration must be the same bits.

All ranks are seeded alike, as in the old examples, so both data parallel groups draw the same masks
for their halves of a batch; the plain run does the halves one after the other, each from the same
state of the generator.
"""

import argparse
import inspect
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from vescale.legacy import DistributedDataParallel, DistributedOptimizer, parallelize_module
from vescale.legacy.devicemesh_api import VESCALE_DEVICE_MESH
from vescale.legacy.dtensor import DTensor, Replicate, Shard, redistribute_dtensor
from vescale.legacy.dtensor.random import manual_seed

LAYERS, HEADS, HIDDEN, SEQUENCE, BATCH, DROPOUT = 2, 4, 64, 32, 8, 0.1
ITERATIONS, SEED, TOLERANCE = 20, 1337, 1e-5


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.c_proj = nn.Linear(HIDDEN, HIDDEN)
        self.attn_dropout, self.resid_dropout = nn.Dropout(DROPOUT), nn.Dropout(DROPOUT)
        past = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
        self.register_buffer("future", ~past.view(1, 1, SEQUENCE, SEQUENCE), persistent=False)

    def forward(self, x):
        batch, sequence, _ = x.shape
        shape = batch, sequence, HEADS, HIDDEN // HEADS
        q, k, v = (
            proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(shape[-1])
        weights = F.softmax(scores.masked_fill(self.future, -math.inf), dim=-1)
        out = self.attn_dropout(weights) @ v
        return self.resid_dropout(self.c_proj(out.transpose(1, 2).reshape(batch, sequence, HIDDEN)))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn, self.mlp = Attention(), MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """[batch, sequence] of bytes, and those that follow -> the mean loss."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(256, HIDDEN),
                "wpe": nn.Embedding(SEQUENCE, HIDDEN),
                "drop": nn.Dropout(DROPOUT),
                "h": nn.ModuleList(Block() for _ in range(LAYERS)),
                "ln_f": nn.LayerNorm(HIDDEN),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, 256, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        nn.init.normal_(self.transformer.wte.weight, std=0.02)

    def forward(self, idx, targets):
        places = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(places)
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


R, S = [Replicate()], lambda dim: [Shard(dim)]
LAYER = r"transformer.h.\d+"
PLAN = {
    "parameter": {
        r"transformer.wte.weight": S(1),
        r"transformer.wpe.weight": S(1),
        r"lm_head.weight": S(1),
        rf"{LAYER}.attn.[qkv]_proj.weight": S(0),
        rf"{LAYER}.attn.[qkv]_proj.bias": S(0),
        rf"{LAYER}.attn.c_proj.weight": S(1),
        rf"{LAYER}.mlp.c_fc.weight": S(0),
        rf"{LAYER}.mlp.c_fc.bias": S(0),
        rf"{LAYER}.mlp.c_proj.weight": S(1),
    },
    "forward": {
        "input": [R, R],
        r"transformer.wte.input": [R],
        r"transformer.wte.output": [R],
        r"transformer.wpe.input": [R],
        r"transformer.wpe.output": [R],
        rf"{LAYER}.input": [S(1)],  # sequence parallel between the layers
        rf"{LAYER}.attn.input": [R],
        rf"{LAYER}.attn.c_proj.output": [S(1)],
        rf"{LAYER}.attn.output": [S(1)],
        rf"{LAYER}.mlp.c_fc.input": [R],
        rf"{LAYER}.mlp.c_proj.output": [S(1)],
        rf"{LAYER}.mlp.output": [S(1)],
        r"transformer.ln_f.input": [S(1)],
        r"lm_head.input": [S(2)],
        r"lm_head.output": [R],
    },
}


def text() -> torch.Tensor:
    """Return the bytes to learn: those of a module of Python's library."""
    source = Path(inspect.getfile(argparse)).read_bytes()
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).long()


def batch(data: torch.Tensor, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets [BATCH, SEQUENCE], the same on every rank."""
    draw = torch.Generator().manual_seed(iteration)
    starts = torch.randint(len(data) - SEQUENCE, (BATCH, 1), generator=draw)
    places = starts + torch.arange(SEQUENCE)
    return data[places], data[places + 1]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of the old script: decay for matrices only."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def record_masks(model: nn.Module) -> list[torch.Tensor]:
    """Return a list that the first call of each dropout adds to: where its result is zero."""
    masks: list[torch.Tensor] = []

    def note(module, args, out):
        if isinstance(out, DTensor):
            out = redistribute_dtensor(out.detach(), placements=R, async_op=False).to_local()
        masks.append(out == 0)
        module.note.remove()

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.note = module.register_forward_hook(note)
    return masks


def train_plain(device: str, halves: int, place: int) -> tuple[list[float], list[torch.Tensor]]:
    """Train in this process alone; return the losses, and the masks of half ``place``."""
    torch.manual_seed(SEED)
    model, data, losses, masks = GPT().to(device), text(), [], []
    optimizer = adamw(model)
    torch.manual_seed(SEED)
    for iteration in range(ITERATIONS):
        inputs, targets = (x.to(device).chunk(halves) for x in batch(data, iteration))
        before, total = torch.get_rng_state(), 0.0
        for half in range(halves):
            torch.set_rng_state(before)
            if iteration == 0 and half == place:
                masks = record_masks(model)
            loss = model(inputs[half], targets[half]) / halves
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, masks


def train_4d(device: str) -> tuple[list[float], list[torch.Tensor]]:
    """Train by the old API; return the mean losses, and this rank's masks, gathered over TP."""
    mesh = VESCALE_DEVICE_MESH.get()
    torch.manual_seed(SEED)
    model = parallelize_module(GPT().to(device), VESCALE_DEVICE_MESH["TP"], PLAN)
    ddp = DistributedDataParallel(
        model,
        VESCALE_DEVICE_MESH["DP"],
        accumulate_allreduce_grads_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=True,
    )
    optimizer = DistributedOptimizer(adamw(model), [ddp], clip_grad=1.0, grad_to_fp32=True)
    masks, data, losses = record_masks(model), text(), []
    manual_seed(SEED, mesh)
    groups, place = mesh.size(0), VESCALE_DEVICE_MESH.get_data_parallel_rank()
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        inputs, targets = (x.to(device).chunk(groups)[place] for x in batch(data, iteration))
        loss = ddp(inputs, targets)
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()
        mean = loss.detach().to_local() / groups
        dist.all_reduce(mean, group=VESCALE_DEVICE_MESH.get_data_parallel_dim_groups())
        losses.append(mean.item())
    return losses, masks


def main() -> None:
    dist.init_process_group("gloo")
    VESCALE_DEVICE_MESH.init_device_mesh("cpu", (2, 2), mesh_dim_names=("DP", "TP"))
    place = VESCALE_DEVICE_MESH.get_data_parallel_rank()
    losses, masks = train_4d("cpu")
    expected, expected_masks = train_plain("cpu", 2, place)
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    same = len(masks) == len(expected_masks) > 0 and all(map(torch.equal, masks, expected_masks))
    if dist.get_rank() == 0:
        print("iteration  DP 2 x TP 2  one process")
        for iteration, pair in enumerate(zip(losses, expected, strict=True)):
            print(f"{iteration:9}  {pair[0]:11.6f}  {pair[1]:11.6f}")
        print(f"largest difference {worst:.1e}; {len(masks)} dropout masks are the same: {same}")
    dist.destroy_process_group()
    if worst > TOLERANCE or not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
