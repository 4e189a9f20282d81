# SPDX-License-Identifier: Apache-2.0
"""Save on four ranks, load on fewer, go on with the bits of a run that was never stopped."""

import itertools

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, init_device_mesh
from vescale.fsdp.optim import Muon

SHAPES = [(8, 8), (33, 7), (7, 33), (64, 32), (1, 9)]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]


def tensors_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]


def reference_after(steps):
    """Return parameters and momenta of torch.optim.Muon; bfloat16 ones have float32 gradients."""
    pairs = zip(tensors_of(0), DTYPES, strict=True)
    params = [torch.nn.Parameter(full.to(dtype)) for full, dtype in pairs]
    optimizer = torch.optim.Muon(params, lr=0.1)
    for step in range(steps):
        for param, grad in zip(params, tensors_of(1 + step), strict=True):
            param.grad_dtype = torch.float32
            param.grad = grad
        optimizer.step()
    return params, [optimizer.state[param]["momentum_buffer"] for param in params]


def part_of(full, mesh, seed):
    generator = torch.Generator().manual_seed(seed * 10 + mesh.size())
    cuts = torch.randint(0, full.numel() + 1, (mesh.size() - 1,), generator=generator).sort()[0]
    edges = [0, *cuts.tolist(), full.numel()]
    cut = RaggedShard((0, 1), [b - a for a, b in itertools.pairwise(edges)])
    start, end = cut.split(full.shape, mesh.get_local_rank())
    return DTensor.from_local(full.reshape(-1)[start:end].clone(), mesh, [cut], shape=full.shape)


def build(mesh):
    model = torch.nn.Module()
    for i, (full, dtype) in enumerate(zip(tensors_of(0), DTYPES, strict=True)):
        param = torch.nn.Parameter(part_of(full.to(dtype), mesh, i))
        param.grad_dtype = torch.float32
        model.register_parameter(f"w{i}", param)
    return model, Muon(model.named_parameters(), lr=0.1)


def train(model, optimizer, mesh, steps):
    for step in steps:
        for i, (param, grad) in enumerate(
            zip(model.parameters(), tensors_of(1 + step), strict=True)
        ):
            param.grad = part_of(grad, mesh, i)
        optimizer.step()


def assert_same_bits(tensors, fulls, mesh):
    for i, (tensor, full) in enumerate(zip(tensors, fulls, strict=True)):
        assert tensor.dtype == full.dtype
        assert torch.equal(tensor.to_local(), part_of(full.detach(), mesh, i).to_local()), i


def state_of(model, optimizer):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def check_save(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model, optimizer = build(mesh)
    train(model, optimizer, mesh, range(2))
    dcp.save(state_of(model, optimizer), checkpoint_id=path)


def check_load(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model, optimizer = build(mesh)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    momenta = [optimizer.state[param]["momentum_buffer"] for param in model.parameters()]
    params, buffers = reference_after(2)
    assert_same_bits(model.parameters(), params, mesh)
    assert_same_bits(momenta, buffers, mesh)
    train(model, optimizer, mesh, range(2, 5))
    params, buffers = reference_after(5)
    assert_same_bits(model.parameters(), params, mesh)
    assert_same_bits(momenta, buffers, mesh)


def test_a_checkpoint_of_four_ranks_continues_on_any_number(run_ranks, tmp_path):
    run_ranks(check_save, 4, tmp_path)
    for world_size in (1, 2, 3):
        run_ranks(check_load, world_size, tmp_path)
