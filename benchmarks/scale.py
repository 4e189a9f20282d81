# SPDX-License-Identifier: Apache-2.0
"""What grows with the number of ranks, on one process: ours against torch's FSDP2, in one run.

    python -m benchmarks.scale [--worlds 8 10240] [--only vescale] [--json result.json]

A fake process group pretends to be 8, 64, 1024 and 10,240 ranks; its collectives return at once,
so what is left is what one rank does by itself. Each row is a process of its own, on one thread.

- wrap: GPT-OSS-120B, 615 tensors of their real shapes on the meta device, a unit per layer. CPU
  seconds; the second wrap, of a second model, finds all layouts planned. Then the padding of all
  units' buffers, in parts of the parameters.
- kept: what Python keeps of such a wrap: MB, blocks of memory, and the length of the longest
  tuple, list, dict or set that the wrapped model leads to.
- step: Llama-3-8B and GPT-OSS-20B with rows (the last dim) divided by ``SHRINK``, so that the
  number of rows, and with it the padding, is nearly that of the real model. A part of each layer
  reads all its parameters. CPU ms of forward and backward, of which some are the fake group's own,
  and of AdamW; and the calls of Python and C functions, which do not scatter. FSDP2 pads experts
  so much that a buffer may outgrow ``MOST_BYTES``; that row is left out.
"""

import argparse
import gc
import json
import math
import multiprocessing
import statistics
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # loaded once a process, by a wrap or an optimizer: no part of what grows
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from testing.growth import count_calls, longest_container, roots_of
from vescale.fsdp import Block, fully_shard
from vescale.fsdp.module import param_groups
from vescale.fsdp.simulate.shapes import Unit, shipped_units

WORLDS = (8, 64, 1024, 10240)
WRAPPED = "gpt-oss-120b"
STEPPED = ("llama3-8b", "gpt-oss-20b")
SHRINK = 1024
MOST_BYTES = 2**29
SIDES = ("vescale", "fsdp2")


class Part(nn.Module):
    """Parameters of a unit's names and shapes; ``forward`` reads each of them once."""

    def __init__(self, unit: Unit, shrink: int, device: str) -> None:
        super().__init__()
        for name, shape in unit.params:
            *path, leaf = name.split(".")
            module = self
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, nn.Module())
                module = getattr(module, step)
            if len(shape) > 1:
                shape = (*shape[:-1], -(-shape[-1] // shrink))
            param = nn.Parameter(torch.zeros(shape, device=device))
            module.register_parameter(leaf, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param in self.parameters():
            x = x + param.view(-1)[0]
        return x


def build(model: str, *, shrink: int = 1, device: str = "cpu") -> nn.Sequential:
    """Return one ``Part`` per unit of the published ``model``, in order."""
    return nn.Sequential(
        *(Part(unit, shrink, device) for unit in shipped_units(model) for _ in range(unit.count))
    )


def wrap(model: nn.Sequential, side: str, mesh: DeviceMesh) -> float:
    """Wrap every part and the whole; return the CPU seconds that it took."""
    shard, options = fsdp2_fully_shard, {"mesh": mesh}
    if side == "vescale":  # blocks of one row of the last dim, also of fused experts
        shard = fully_shard
        options["granularity"] = lambda _, p: Block(max(1, p.ndim - 1), 1)
    begin = time.process_time()
    for part in model:
        shard(part, **options)
    shard(model, **options)
    return time.process_time() - begin


def buffer_numels(model: nn.Sequential, side: str, world_size: int) -> list[int]:
    """Return the elements of every unit's full buffer, padding included."""
    if side == "vescale":
        return [group.plan.buffer_numel for group in param_groups(model)]
    return [  # FSDP2 pads every parameter along dim 0 to the same on every rank
        sum(
            -(-p.shape[0] // world_size) * world_size * math.prod(p.shape[1:])
            for p in part.parameters()
        )
        for part in model
    ]


def padding(model: nn.Sequential, side: str, world_size: int) -> float:
    """Return what all buffers hold besides parameters, over the latter."""
    numel = sum(p.numel() for p in model.parameters())
    return sum(buffer_numels(model, side, world_size)) / numel - 1


def measure_wrap(side: str, world_size: int) -> dict:
    """Return CPU seconds of the mesh, the first wrap and the second, and the padding."""
    begin = time.process_time()
    mesh = init_device_mesh("cpu", (world_size,))
    mesh_seconds = time.process_time() - begin
    first, second = build(WRAPPED, device="meta"), build(WRAPPED, device="meta")
    return {
        "tensors": len(list(first.parameters())),
        "mesh s": mesh_seconds,
        "wrap s": wrap(first, side, mesh),
        "second wrap s": wrap(second, side, mesh),
        "padding": padding(first, side, world_size),
    }


def measure_kept(side: str, world_size: int) -> dict:
    """Return what Python keeps of one wrap."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = build(WRAPPED, device="meta")
    gc.collect()
    blocks = sys.getallocatedblocks()
    tracemalloc.start()
    wrap(model, side, mesh)
    gc.collect()
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "MB": nbytes / 2**20,
        "blocks": sys.getallocatedblocks() - blocks,
        "longest": longest_container(*roots_of(model)),
    }


def measure_step(model_name: str, side: str, world_size: int, steps: int = 6) -> dict:
    """Return CPU ms and function calls of forward and backward, and of the optimizer."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = build(model_name, shrink=SHRINK)
    nbytes = 4 * max(buffer_numels(model, "fsdp2", world_size)) if side == "fsdp2" else 0
    if nbytes > MOST_BYTES:
        return {"left out, a buffer of MB": nbytes / 2**20}
    wrap(model, side, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def passes() -> None:
        model(torch.zeros((), requires_grad=True)).backward()

    times: dict[str, list[float]] = {"step ms": [], "AdamW ms": []}
    for index in range(steps):
        for name, part in (("step ms", passes), ("AdamW ms", optimizer.step)):
            begin = time.process_time()
            part()
            if index > 1:
                times[name].append(1000 * (time.process_time() - begin))
        optimizer.zero_grad()
    result = {name: statistics.median(values) for name, values in times.items()}
    numels = buffer_numels(model, side, world_size)
    result["of it the fake group"] = fake_group_ms(numels, world_size)
    result["step calls"] = count_calls(passes)
    result["AdamW calls"] = count_calls(optimizer.step)
    result["padding"] = padding(model, side, world_size)
    return result


def fake_group_ms(numels: list[int], world_size: int) -> float:
    """Return the CPU ms that two gathers and a reduction of such buffers take by themselves.

    The fake group copies a gather's input to every rank's place, one by one.
    """
    buffers = [torch.empty(numel // world_size * world_size) for numel in numels]
    begin = time.process_time()
    for full in buffers:
        part = full.new_empty(len(full) // world_size)
        dist.all_gather_into_tensor(full, part)
        dist.all_gather_into_tensor(full, part)
        dist.reduce_scatter_tensor(part, full)
    return 1000 * (time.process_time() - begin)


def in_process(measure: Callable[..., dict], *arguments: object) -> dict:
    """Return ``measure(*arguments)``, run in a fresh process with a fake group.

    The last argument is the number of ranks.
    """
    context = multiprocessing.get_context("fork")  # torch is imported and has not run
    mine, its = context.Pipe()
    process = context.Process(target=_child, args=(its, measure, arguments))
    process.start()
    its.close()
    try:
        return mine.recv()
    except EOFError:
        raise RuntimeError(f"{measure.__name__}{arguments} ended without a result.") from None
    finally:
        process.join()


def _child(connection, measure: Callable[..., dict], arguments: tuple) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # names that newer versions rename
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what the imports made is no part of the costs of a collection
    world_size = arguments[-1]
    dist.init_process_group("fake", store=FakeStore(), rank=world_size // 2, world_size=world_size)
    connection.send(measure(*arguments))
    connection.close()


def main() -> None:
    """Print the rows as they are reached."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--only", choices=SIDES)
    parser.add_argument("--parts", nargs="+", default=("wrap", "kept", "step"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jobs = {
        "wrap": [(f"wrap {WRAPPED}", measure_wrap, ())],
        "kept": [(f"kept of {WRAPPED}", measure_kept, ())],
        "step": [(f"step {model}", measure_step, (model,)) for model in STEPPED],
    }
    rows = []
    for name, measure, extra in (job for part in args.parts for job in jobs[part]):
        for side in SIDES if args.only is None else (args.only,):
            for world_size in args.worlds:
                found = in_process(measure, *extra, side, world_size)
                rows.append({"what": name, "side": side, "ranks": world_size, **found})
                print(f"{name:<21}{side:<8}{world_size:>7,}  {_cells(found)}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


def _cells(found: dict) -> str:
    return "  ".join(
        f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value:,}"
        for name, value in found.items()
    )


if __name__ == "__main__":
    main()
