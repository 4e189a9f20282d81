# SPDX-License-Identifier: Apache-2.0
"""Save in one layout, load in any other, and go on: with the bits of a run that never stopped.

Gradients are given: the same whole tensors for every layout. So nothing but storage, checkpoint and
optimizer is under test, and all of them are exact: AdamW works element by element, Muon on whole
matrices at one owner, AdamW8bit on whole blocks. Every case is compared bit by bit, parameters and
optimizer states, with one process that trains plain tensors with torch's own optimizers and never
saves. (With gradients of real backward passes another number of ranks adds up in another order.)

What cannot be is left out: AdamW8bit needs whole blocks of 32 rows on a rank, Muon and AdamW8bit
take no tensor-parallel parameters. ``VESCALE_RESHARD=all`` runs all combinations, otherwise a set
that has every pair of values.
"""

import functools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from testing.pairwise import pairwise
from testing.ranks import DEVICE
from vescale.dtensor import distribute_tensor
from vescale.fsdp import Elements, Rows, Whole, fully_shard
from vescale.fsdp.checkpoint.reading import read
from vescale.fsdp.optim import AdamW8bit, Muon
from vescale.fsdp.state_dict import get_state_dict

MESHES = {
    "1": ((1,), ("dp",)),
    "2": ((2,), ("dp",)),
    "3": ((3,), ("dp",)),
    "4": ((4,), ("dp",)),
    "2 hsdp": ((2, 1), ("rep", "dp")),
    "4 hsdp": ((2, 2), ("rep", "dp")),
    "2 tp": ((1, 2), ("dp", "tp")),
    "4 tp": ((2, 2), ("dp", "tp")),
}
GRANULARITIES = {"rows:1": Rows(1), "rows:32": Rows(32), "elements": Elements(), "whole": Whole()}
OPTIMIZERS = ("adamw", "muon", "adamw8bit")
BEFORE, AFTER = 2, 3  # steps before the save, and compared after the load


def allowed(mesh, granularity, optimizer):
    if optimizer == "adamw8bit" and granularity not in ("rows:32", "whole"):
        return False
    return optimizer == "adamw" or "tp" not in mesh


def valid(saver, cut, loader, new_cut, optimizer):
    return allowed(saver, cut, optimizer) and allowed(loader, new_cut, optimizer)


def cases():
    factors = (MESHES, GRANULARITIES, MESHES, GRANULARITIES, OPTIMIZERS)
    chosen = pairwise([*map(tuple, factors)], valid)
    if os.environ.get("VESCALE_RESHARD") == "all":
        chosen = [
            (a, b, c, d, e)
            for a in MESHES
            for b in GRANULARITIES
            for c in MESHES
            for d in GRANULARITIES
            for e in OPTIMIZERS
            if valid(a, b, c, d, e)
        ]
    return chosen


def ranks_of(mesh):
    return int(mesh[0])


class Net(nn.Module):
    """Two matrices that AdamW8bit quantizes, one with rows left over, and vectors."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(40, 128), nn.LayerNorm(40)
        self.down = nn.Linear(128, 104, bias=False)

    def forward(self, x):
        return self.down(self.up(self.norm(x)))


def numbers(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def plain(seed=0):
    model = Net().to(DEVICE)
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(numbers(param.shape, 1000 * seed + index))
    return model


def make_optimizers(model, name):
    params = dict(model.named_parameters())
    if name == "adamw8bit":
        return (AdamW8bit(params.items(), lr=0.02),)
    if name == "adamw":
        return (torch.optim.AdamW(params.values(), lr=0.02, foreach=True),)
    matrices = [p for p in params.values() if p.ndim == 2]
    rest = [p for p in params.values() if p.ndim != 2]
    wrapped = any(isinstance(p, TorchDTensor) for p in matrices)
    muon = Muon if wrapped else torch.optim.Muon
    return muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.02)


@functools.cache
def mesh_of(name):
    """Return a mesh, once in each process: a group of gloo keeps threads that never rest."""
    shape, names = MESHES[name]
    return init_device_mesh(DEVICE, shape, mesh_dim_names=names)


def make(mesh, granularity, optimizer, seed=0):
    mesh = mesh_of(mesh)
    names = mesh.mesh_dim_names
    model = plain(seed)
    if "tp" in names:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    data = mesh["dp"] if "tp" in names else mesh
    fully_shard(model, mesh=data, granularity=GRANULARITIES[granularity])
    return model, make_optimizers(model, optimizer)


def train(model, optimizers, steps):
    for step in steps:
        for index, param in enumerate(model.parameters()):
            grad = numbers(param.shape, 100 + 10 * step + index)
            if isinstance(param, TorchDTensor):
                grad = distribute_tensor(
                    grad, param.device_mesh, param.placements, src_data_rank=None
                )
            param.grad = grad
        for optimizer in optimizers:
            optimizer.step()


def wholes(model, optimizers):
    """Return parameters and optimizer states by name, whole."""
    state = dict(model.named_parameters())
    named = get_state_dict(model, optimizers)[1]["state"]
    for fqn, values in named.items():
        state |= {f"{fqn} {name}": value for name, value in values.items()}
    return {
        name: (x.full_tensor() if isinstance(x, TorchDTensor) else x).detach().clone()
        for name, x in state.items()
    }


def reference(optimizer):
    """Train in one process, with nothing of ours but AdamW8bit."""
    model = plain()
    optimizers = make_optimizers(model, optimizer)
    train(model, optimizers, range(BEFORE))
    saved = wholes(model, optimizers)
    train(model, optimizers, range(BEFORE, BEFORE + AFTER))
    return saved, wholes(model, optimizers)


def same(found, expected, where):
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, (where, name)
        assert torch.equal(found[name], value), (where, name)


def check_save(rank, world_size, path, layouts):
    for mesh, granularity, optimizer in layouts:
        model, optimizers = make(mesh, granularity, optimizer)
        train(model, optimizers, range(BEFORE))
        state = get_state_dict(model, optimizers)
        state = dict(zip(("model", "optimizer"), state, strict=True))
        dcp.save(state, checkpoint_id=path / f"{mesh} {granularity} {optimizer}")


def check_load(rank, world_size, path, chosen):
    references = {name: reference(name) for name in OPTIMIZERS}
    for saver, cut, loader, new_cut, optimizer in chosen:
        where = f"{saver} {cut} to {loader} {new_cut}, {optimizer}"
        model, optimizers = make(loader, new_cut, optimizer, seed=1)
        source = path / f"{saver} {cut} {optimizer}"
        read(source, model, optimizers, dist.group.WORLD, strict=True)
        saved, later = references[optimizer]
        same(wholes(model, optimizers), saved, where)
        train(model, optimizers, range(BEFORE, BEFORE + AFTER))
        same(wholes(model, optimizers), later, where)
    print(f"{len(chosen)} pairs of layouts onto {world_size} ranks", flush=True)


def test_any_layout_goes_on_from_any_other(run_ranks, tmp_path):
    chosen = cases()
    layouts = sorted({(saver, cut, optimizer) for saver, cut, _, _, optimizer in chosen})
    for world_size in (1, 2, 3, 4):
        mine = [layout for layout in layouts if ranks_of(layout[0]) == world_size]
        run_ranks(check_save, world_size, tmp_path, mine, exact=True, limit=600)
    for world_size in (1, 2, 3, 4):
        mine = [case for case in chosen if ranks_of(case[2]) == world_size]
        run_ranks(check_load, world_size, tmp_path, mine, exact=True, limit=7200)
    print(f"{len(chosen)} pairs of layouts, each bit for bit, from {len(layouts)} checkpoints")
