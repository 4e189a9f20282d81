# SPDX-License-Identifier: Apache-2.0
"""One GPU that pretends to be one of 64: what a step launches there, without any network.

``fsdp_vs_fsdp2 --gpu`` runs it. The process group is torch's fake one, whose collectives return at
once, so parameters and losses mean nothing, and kernels, launches, host time and memory do.
"""

import statistics
import time

import torch
import torch.distributed as dist
from benchmarks.step_models import SHAPES, build, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.fsdp import fully_shard

RANKS = 64
STEPS = 20
COPIES = ("copy", "cat", "split", "memcpy dtod")  # in the names of kernels, lower case
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def measure(kind: str, size: str) -> dict:
    """Return, and print, what a step of FSDP2 and of ours does beyond the unwrapped model."""
    if not torch.cuda.is_available():
        raise RuntimeError("--gpu needs a CUDA device, and torch sees none.")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        result = {"model": kind, "size": size, "ranks": RANKS, "sides": {}}
        result["parameters"] = sum(p.numel() for p in build(kind, size).parameters())
        for name in ("alone", "fsdp2", "vescale"):
            result["sides"][name] = _measure_side(name, kind, size)
            torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()
    _print(result)
    return result


def _measure_side(name: str, kind: str, size: str) -> dict[str, float]:
    model = build(kind, size).cuda()
    if name == "alone":
        model.to(POLICY.param_dtype)
    else:
        shard = fully_shard if name == "vescale" else fsdp2_fully_shard
        mesh = init_device_mesh("cuda", (RANKS,))
        for unit in (*model.layers, model):
            shard(unit, mesh=mesh, mp_policy=POLICY)
    batch = tokens(0, 0).cuda()

    def step() -> None:
        logits = model(batch[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
        for parameter in model.parameters():
            parameter.grad = None

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    host = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    requests = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    requests = torch.cuda.memory_stats()["allocation.all.allocated"] - requests
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [
        event.name.lower()
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return {
        "kernels": len(kernels),
        "copy kernels": sum(any(part in name for part in COPIES) for name in kernels),
        "host time, ms": round(1e3 * statistics.median(host), 2),
        "allocations": requests,
        "peak memory, MB": round(peak / 2**20, 1),
    }


def _print(result: dict) -> None:
    width = SHAPES[result["size"]].dim
    print(f"\n{result['model']}, width {width}, one GPU as one of {RANKS} ranks, bf16")
    sides = result["sides"]
    print(f"{'':24}" + "".join(f"{name:>10}" for name in sides))
    for row in next(iter(sides.values())):
        print(f"{row:24}" + "".join(f"{side[row]:>10.6g}" for side in sides.values()))
