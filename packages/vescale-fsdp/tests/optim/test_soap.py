# SPDX-License-Identifier: Apache-2.0
"""SOAP in blocks: a float64 reference, and the bits of one process on any layout."""

import copy
import itertools
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from testing.collectives import CountCollectives
from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, init_device_mesh
from vescale.fsdp.optim import SOAP

# Blocks of 6 x 6 and less. None is so narrow that few gradients leave eigenvectors to chance.
SHAPES = {"square": (9, 9), "tall": (15, 9), "wide": (9, 15), "experts": (2, 6, 4)}
OPTIONS = {"lr": 0.05, "block_size": 6, "precondition_frequency": 3, "weight_decay": 0.1}


def tensors_of(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        for name, shape in SHAPES.items()
    }


def cut(full, mesh, seed):
    ranks = mesh.size()
    generator = torch.Generator().manual_seed(seed * 7 + ranks)
    edges = torch.randint(0, full.numel() + 1, (ranks - 1,), generator=generator).sort()[0]
    edges = [0, *edges.tolist(), full.numel()]
    placement = RaggedShard(tuple(range(full.ndim)), [b - a for a, b in itertools.pairwise(edges)])
    start, end = placement.split(full.shape, mesh.get_local_rank())
    local = full.reshape(-1)[start:end].clone()
    return DTensor.from_local(local, mesh, [placement], shape=full.shape)


def build(mesh=None, dtype=torch.float32, **options):
    model = nn.Module()
    for i, (name, full) in enumerate(tensors_of(0, dtype).items()):
        param = full if mesh is None else cut(full, mesh, i)
        model.register_parameter(name, nn.Parameter(param))
    return model, SOAP(model.named_parameters(), **OPTIONS, **options)


def train(model, optimizer, steps, mesh=None):
    for step in steps:
        for i, (name, param) in enumerate(model.named_parameters()):
            grad = tensors_of(1 + step, param.dtype)[name]
            param.grad = grad if mesh is None else cut(grad, mesh, i)
        optimizer.step()


def blocks_of(full, size):
    for expert in full if full.ndim == 3 else full[None]:
        for rows in expert.split(size, 0):
            yield from enumerate(rows.split(size, 1))


def reference(steps, kl):
    """Train in float64, block by block, with explicit products and inverses."""
    params = tensors_of(0, torch.float64)
    beta1, beta2, eps, lr = 0.95, 0.95, 1e-8, OPTIONS["lr"]
    every, size = OPTIONS["precondition_frequency"], OPTIONS["block_size"]
    memory = {}
    for step in range(1, steps + 1):
        grads = tensors_of(step, torch.float64)
        for name, param in params.items():
            pairs = zip(blocks_of(param, size), blocks_of(grads[name], size), strict=True)
            seen = -1
            for (place, weights), (_, g) in pairs:
                seen += place == 0
                g = g.contiguous()
                m, n = g.shape
                s = memory.setdefault((name, seen, place), {})
                if step == 1:
                    s["L"], s["R"] = g @ g.T, g.T @ g
                    if kl:  # bit for bit: equal eigenvalues leave their vectors to rounding
                        left, right = g * (1 / math.sqrt(n)), g * (1 / math.sqrt(m))
                        s["L"], s["R"] = left @ left.T, right.T @ right
                        for key in "LR":
                            mean = s[key].diagonal().mean()
                            s[key] = s[key] * 0.5
                            s[key].diagonal().add_(0.5 * mean)
                    for q, key in (("QL", "L"), ("QR", "R")):
                        s[q] = torch.linalg.eigh(s[key])[1].flip(-1)
                    s["M"], s["V"] = torch.zeros_like(g), torch.zeros_like(g)
                    weights *= 1 - lr * OPTIONS["weight_decay"]
                    continue
                s["M"] = beta1 * s["M"] + (1 - beta1) * g
                s["V"] = beta2 * s["V"] + (1 - beta2) * (s["QL"].T @ g @ s["QR"]) ** 2
                mean = s["QL"].T @ s["M"] @ s["QR"] / (1 - beta1 ** (step - 1))
                turned = mean / ((s["V"] / (1 - beta2 ** (step - 1))).sqrt() + eps)
                weights *= 1 - lr * OPTIONS["weight_decay"]
                weights -= lr * s["QL"] @ turned @ s["QR"].T
                left, right = g @ g.T, g.T @ g
                if kl:
                    inverses = []
                    for q, key in (("QL", "L"), ("QR", "R")):
                        values = (s[q].T @ s[key] @ s[q]).diagonal()
                        inverses.append(s[q] @ ((values.sqrt() + eps) ** -2).diag() @ s[q].T)
                    left, right = g @ inverses[1] @ g.T / n, g.T @ inverses[0] @ g / m
                s["L"], s["R"] = (
                    beta2 * old + (1 - beta2) * new
                    for old, new in ((s["L"], left), (s["R"], right))
                )
                if (step + seen + place) % every == 0:
                    for dim, (q, key) in enumerate((("QL", "L"), ("QR", "R"))):
                        values = (s[q].T @ s[key] @ s[q]).diagonal()
                        order = values.argsort(descending=True)
                        s["V"] = s["V"].index_select(dim, order)
                        s[q] = torch.linalg.qr(s[key] @ s[q][:, order])[0]
    return params


@pytest.mark.parametrize("kl", [False, True])
def test_twenty_steps_follow_a_float64_reference(kl):
    """D1, one process: 20 steps within 1e-5 relative."""
    model, optimizer = build(dtype=torch.float64, wire_dtype=torch.float64, kl=kl)
    train(model, optimizer, range(20))
    for name, expected in reference(20, kl).items():
        error = (getattr(model, name).detach() - expected).norm() / expected.norm()
        assert error <= 1e-5


def check_bits(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    cases = [{}, {"kl": True}, {"wire_dtype": torch.bfloat16, "max_inflight_bytes": 200}]
    for dtype, options in [(torch.float32, case) for case in cases] + [(torch.bfloat16, {})]:
        model, optimizer = build(mesh, dtype, **options)
        alone, expected = build(None, dtype, **options)
        train(model, optimizer, range(8), mesh)
        train(alone, expected, range(8))
        for param, whole in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(param.full_tensor(), whole)
            for name, value in expected.state[whole].items():
                mine = optimizer.state[param][name]
                mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
                assert torch.equal(mine, value), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_get_the_bits_of_one_process(run_ranks, world_size):
    run_ranks(check_bits, world_size)


def check_traffic(rank, world_size):
    """Bytes, missing gradients, and mistakes that every rank reports."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    model, optimizer = build(mesh, wire_dtype=torch.bfloat16)
    train(model, optimizer, range(1), mesh)
    with CountCollectives() as count:
        optimizer.step()
    sent = torch.tensor([count.nbytes], device=DEVICE)
    torch.distributed.all_reduce(sent)
    (plan,) = optimizer.plans
    flags = len(SHAPES) * world_size * (world_size - 1)
    assert sent.item() == 4 * plan.moved_numel + flags

    before = {name: param.full_tensor() for name, param in model.named_parameters()}
    steps = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters()}
    model.tall.grad = None
    if rank == 0:
        model.wide.grad = None
    optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), before[name]) == (name == "tall")
        assert int(optimizer.state[param]["step"]) == steps[name] + (name != "tall")

    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    saved["state"][0]["0.0.exp_avg"] = torch.zeros(6, 6, device=DEVICE)
    with pytest.raises(ValueError, match=r"'square': 0.0.exp_avg has"):
        optimizer.load_state_dict(saved)


def test_bytes_missing_gradients_and_mistakes(run_ranks):
    """D3: bytes = 4 x moved elements with bfloat16 on the wire, and one flag per pair of ranks."""
    run_ranks(check_traffic, 2, exact=True)


def state_of(model, optimizer):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def check_save(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model, optimizer = build(mesh)
    train(model, optimizer, range(4), mesh)
    dcp.save(state_of(model, optimizer), checkpoint_id=path)


def check_load(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model, optimizer = build(mesh)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, range(4, 7), mesh)
    alone, expected = build()
    train(alone, expected, range(7))
    for param, whole in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), whole)


def test_state_moves_to_the_roots_of_other_ranks(run_ranks, tmp_path):
    """D2: saved on 3 ranks, loaded on 1 and 2; the next steps are those of a run not stopped."""
    run_ranks(check_save, 3, tmp_path)
    for world_size in (1, 2):
        run_ranks(check_load, world_size, tmp_path)


def test_a_copied_optimizer_goes_on_and_groups_can_be_added():
    model, optimizer = build()
    train(model, optimizer, range(2))
    twin_model, twin = copy.deepcopy((model, optimizer))
    extra = nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [("extra", extra)], "kl": True})
    for net, opt in ((model, optimizer), (twin_model, twin)):
        train(net, opt, range(2, 4))
    for one, other in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3,), {}, "SOAP takes matrices"),
        ((4, 4), {"lr": -1.0}, "lr=-1.0"),
        ((4, 4), {"betas": (0.9, 1.0)}, "betas"),
        ((4, 4), {"block_size": 0}, "block_size=0"),
        ((4, 4), {"precondition_frequency": 0}, "precondition_frequency=0"),
        ((4, 4), {"wire_dtype": torch.float16}, "wire_dtype"),
    ],
)
def test_wrong_arguments_are_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        SOAP([nn.Parameter(torch.zeros(shape))], **options)
