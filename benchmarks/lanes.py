# SPDX-License-Identifier: Apache-2.0
"""What one more lane costs: 1 against 2 and 3 coalesced gathers of equal total size.

    python -m benchmarks.lanes --ranks 2 4 [--device cuda] [--json result.json]

Every rank gives the same number of bytes, in one gather or in several that are launched together.
Repeats take turns, and a cell is the least of them, which load on the machine disturbs least. A
straight line is fitted to all cells of a world:

    seconds = launch + lane * (lanes - 1) + byte * nbytes_of_a_shard

``lane / byte`` is what a lane costs in bytes of a shard: where an extra lane saves more padding
than that, it pays. On a GPU times are from events of the stream, one rank per GPU, on NCCL.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.distributed_c10d import _coalescing_manager

LANES = (1, 2, 3)
ALIGN = 64  # bytes
SHARDS = tuple(2**power for power in range(14, 23, 2))  # bytes of a rank's shard: 16 KiB to 4 MiB
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def cut(numel: int, lanes: int) -> list[int]:
    """Return the sizes of ``lanes`` nearly equal parts of ``numel`` bytes, aligned."""
    part = numel // lanes // ALIGN * ALIGN
    return [part] * (lanes - 1) + [numel - part * (lanes - 1)]


def gather(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Gather each (full, shard), all in one launch."""
    with _coalescing_manager(async_ops=True) as launch:
        for full, shard in parts:
            all_gather_flat(full, shard)
    launch.wait()


def seconds_of(parts: list[tuple[torch.Tensor, torch.Tensor]], calls: int) -> float:
    """Return the seconds of one gather, in a row of ``calls``."""
    device = parts[0][0].device
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        gather(parts)
    if device.type == "cuda":
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000 / calls
    return (time.perf_counter() - start) / calls


def measure(device: torch.device, repeats: int) -> dict[tuple[int, int], float]:
    """Return the least seconds of a gather by (shard bytes, lanes); the slowest rank counts."""
    times: dict[tuple[int, int], list[float]] = {}
    for nbytes in SHARDS:
        shard = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        full = torch.zeros(nbytes * dist.get_world_size(), dtype=torch.uint8, device=device)
        parts = {}
        for lanes in LANES:
            sizes = cut(nbytes, lanes)
            fulls = full.split([size * dist.get_world_size() for size in sizes])
            parts[lanes] = list(zip(fulls, shard.split(sizes), strict=True))
            gather(parts[lanes])
        calls = max(1, min(8, 2**20 // nbytes))
        for repeat in range(repeats):
            turns = LANES if repeat % 2 else LANES[::-1]
            for lanes in turns:
                dist.barrier()
                times.setdefault((nbytes, lanes), []).append(seconds_of(parts[lanes], calls))
    cells = sorted(times)
    least = torch.tensor([min(times[cell]) for cell in cells], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MAX)
    return dict(zip(cells, least.tolist(), strict=True))


def fit(cells: dict[tuple[int, int], float]) -> dict[str, float]:
    """Fit launch, lane and byte so that the sum of squared relative errors is least."""
    rows = torch.tensor([[1.0, lanes - 1, nbytes] for nbytes, lanes in cells], dtype=torch.float64)
    seconds = torch.tensor(list(cells.values()), dtype=torch.float64)
    scale = rows.abs().amax(0)
    answer = torch.linalg.lstsq(rows / scale / seconds[:, None], torch.ones_like(seconds)[:, None])
    launch, lane, byte = (answer.solution[:, 0] / scale).tolist()
    return {"launch": launch, "lane": lane, "byte": byte, "lane_nbytes": lane / byte}


def print_table(world_size: int, cells: dict[tuple[int, int], float], line: dict) -> None:
    print(f"\n{world_size} ranks, microseconds of one gather\n{'shard':>12}", end="")
    print("".join(f"{f'{lanes} lanes':>12}" for lanes in LANES) + f"{'a lane':>12}")
    for nbytes in SHARDS:
        row = [1e6 * cells[nbytes, lanes] for lanes in LANES]
        slope = (row[-1] - row[0]) / (LANES[-1] - LANES[0])
        print(f"{nbytes // 1024:>8} KiB" + "".join(f"{value:>12.1f}" for value in [*row, slope]))
    print(
        f"fitted: launch {1e6 * line['launch']:.1f} us, each further lane "
        f"{1e6 * line['lane']:.1f} us, {1e-9 / line['byte']:.2f} GB/s of shard; "
        f"a lane costs as much as {line['lane_nbytes'] / 1024:.0f} KiB of a shard"
    )


def main_rank(rank: int, world_size: int, args: argparse.Namespace, path: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.FileStore(path, world_size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    cells = measure(device, args.repeats)
    if rank == 0:
        line = fit(cells)
        print_table(world_size, cells, line)
        if args.json is not None:
            table = {f"{nbytes} bytes, {lanes} lanes": s for (nbytes, lanes), s in cells.items()}
            known = json.loads(args.json.read_text()) if args.json.exists() else {}
            known[f"{backend}, {world_size} ranks"] = {"seconds": table, "fit": line}
            args.json.write_text(json.dumps(known, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print a table and a fit for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=15, help="timings of each cell")
    parser.add_argument("--json", type=Path, help="add the numbers to this file")
    args = parser.parse_args()
    for world_size in args.ranks:
        with tempfile.TemporaryDirectory() as scratch:
            job = (world_size, args, f"{scratch}/store")
            mp.start_processes(main_rank, job, nprocs=world_size, start_method="spawn")


if __name__ == "__main__":
    main()
