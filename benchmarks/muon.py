# SPDX-License-Identifier: Apache-2.0
"""What a Muon step sends, computes and returns: ours against torch.optim.Muon, in one run.

    python -m benchmarks.muon --ranks 4

Counters and ratios only, so the machine does not matter: collectives and bytes of one step, the
matrix-product FLOPs of all ranks over those of one process, and whether the weights equal, bit for
bit, those of torch.optim.Muon in one process after three steps.
"""

import argparse
import math
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.utils._python_dispatch import TorchDispatchMode

from testing.collectives import CountCollectives
from vescale.dtensor import DeviceMesh, RaggedShard, distribute_tensor, init_device_mesh
from vescale.fsdp.optim import Muon

STEPS = 3
OPTIONS = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}


def layer_shapes(width: int) -> list[tuple[int, int]]:
    """Return the matrices of one Llama-like layer: q, k, v, o, gate, up, down."""
    small, wide = width // 4, width * 11 // 4
    attention = [(width, width), (small, width), (small, width), (width, width)]
    return [*attention, (wide, width), (wide, width), (width, wide)]


class CountMatmuls(TorchDispatchMode):
    """Count the FLOPs of matrix products, those of DTensors as their local parts."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, TorchDTensor) for kind in types):
            return NotImplemented  # its local products come by later
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            self.flops += 2 * left.size(0) * left.size(1) * right.size(1)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Result:
    """One row of the table. Bytes are those sent, all ranks summed."""

    name: str
    collectives: int
    bytes_per_param: float
    flop_ratio: float
    equal: int
    largest_error: float


def tensors_of(shapes: list[tuple[int, int]], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def flat_cuts(layer: list[tuple[int, int]], world_size: int) -> list[RaggedShard]:
    """Cut one layer's matrices, end to end in memory, into equal shards, anywhere inside rows."""
    numels = [math.prod(shape) for shape in layer]
    shard, begin, cuts = -(-sum(numels) // world_size), 0, []
    for numel in numels:
        edges = [min(max(rank * shard - begin, 0), numel) for rank in range(world_size)] + [numel]
        cuts.append(RaggedShard((0, 1), [edges[r + 1] - edges[r] for r in range(world_size)]))
        begin += numel
    return cuts


def owners(shapes: list[tuple[int, int]], world_size: int) -> list[RaggedShard]:
    """Keep each matrix whole, on the ranks in turn."""
    return [
        RaggedShard((), [int(rank == index % world_size) for rank in range(world_size)])
        for index in range(len(shapes))
    ]


def run_reference(shapes: list[tuple[int, int]]) -> tuple[list[torch.Tensor], int]:
    """Return the weights after STEPS steps in one process, and the FLOPs of one step."""
    params = [torch.nn.Parameter(full) for full in tensors_of(shapes, 0)]
    optimizer = torch.optim.Muon(params, **OPTIONS)
    for step in range(STEPS):
        for param, grad in zip(params, tensors_of(shapes, 1 + step), strict=True):
            param.grad = grad
        with CountMatmuls() as matmuls:
            optimizer.step()
    return [param.detach() for param in params], matmuls.flops


def run(
    name, distribute, placements, make_optimizer, mesh: DeviceMesh, shapes, reference
) -> Result:
    expected, flops = reference
    pairs = list(zip(tensors_of(shapes, 0), placements, strict=True))
    params = [torch.nn.Parameter(distribute(full, mesh, [p])) for full, p in pairs]
    optimizer = make_optimizer(params)
    for step in range(STEPS):
        for param, grad, p in zip(params, tensors_of(shapes, 1 + step), placements, strict=True):
            param.grad = distribute(grad, mesh, [p])
        with CountCollectives() as comm, CountMatmuls() as matmuls:
            optimizer.step()
    sums = torch.tensor([comm.nbytes, matmuls.flops], dtype=torch.int64)
    dist.all_reduce(sums)
    fulls = [param.detach().full_tensor() for param in params]
    errors = [
        (full - whole).abs().max().item() for full, whole in zip(fulls, expected, strict=True)
    ]
    numel = sum(full.numel() for full in fulls)
    return Result(
        name=name,
        collectives=comm.total,
        bytes_per_param=sums[0].item() / numel,
        flop_ratio=sums[1].item() / flops,
        equal=sum(error == 0 for error in errors),
        largest_error=max(errors),
    )


def measure(layers: int, width: int) -> list[Result]:
    """Return the rows of the table; collective, on the default process group."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    layer = layer_shapes(width)
    shapes = layer * layers
    reference = run_reference(shapes)
    rows, cuts = [Shard(0)] * len(shapes), flat_cuts(layer, world_size) * layers

    def torch_muon(params):
        return torch.optim.Muon(params, **OPTIONS)

    def muon(params):
        return Muon(params, **OPTIONS)

    def muon_fp32(params):
        return Muon(params, wire_dtype=torch.float32, **OPTIONS)

    return [
        run(name, distribute, placements, make, mesh, shapes, reference)
        for name, distribute, placements, make in (
            ("torch.optim.Muon, Shard(0)", torch_distribute, rows, torch_muon),
            ("ours, the same Shard(0)", torch_distribute, rows, muon),
            ("ours, ragged, float32 wire", distribute_tensor, cuts, muon_fp32),
            ("ours, ragged", distribute_tensor, cuts, muon),
            ("ours, whole matrices", distribute_tensor, owners(shapes, world_size), muon),
        )
    ]


def main_rank(rank: int, world_size: int, layers: int, width: int, path: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    results = measure(layers, width)
    if rank == 0:
        print_table(results, layers * len(layer_shapes(width)), world_size)
    dist.destroy_process_group()


def print_table(results: list[Result], count: int, world_size: int) -> None:
    stock = results[0]
    print(f"{count} matrices, {world_size} ranks; one step, bytes and FLOPs of all ranks")
    print(f"{'':28}{'collectives':>12}{'bytes/param':>13}{'of stock':>10}{'FLOPs':>8}{'equal':>9}")
    for row in results:
        print(
            f"{row.name:28}{row.collectives:>12}{row.bytes_per_param:>13.2f}"
            f"{row.bytes_per_param / stock.bytes_per_param:>10.3f}{row.flop_ratio:>7.2f}x"
            f"{row.equal:>5}/{count}  largest difference {row.largest_error:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        job = (args.ranks, args.layers, args.width, f"{scratch}/store")
        mp.start_processes(main_rank, job, nprocs=args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
