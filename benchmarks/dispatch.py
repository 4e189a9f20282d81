# SPDX-License-Identifier: Apache-2.0
"""What an operator costs besides its arithmetic: ours against torch's DTensor, in one process.

    python -m benchmarks.dispatch [--repeats 15] [--json result.json]

Five kinds of small tensors go through the same operators on a fake process group of 4 ranks, which
sends nothing: plain tensors; torch's DTensor as Shard(0); ours as RaggedShard; ours as Shard(0);
and what ``as_torch()`` makes of the latter. CPU time of one thread. Repeats of all kinds take
turns, and a cell is their median, so load on the machine moves all cells of a row alike. Exits
with 1 if a ratio misses its target by more than noise may explain (--tolerance).
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.dtensor import DeviceMesh, RaggedShard, Shard, distribute_tensor, init_device_mesh

RANKS, RANK = 4, 1
ROWS, COLUMNS = 16, 8
UNITS = (1, 3, 2, 2)  # rank 1 holds 6 rows of 16
PARAMS = 100
KINDS = ("plain", "stock", "ragged", "ours", "as_torch")
CALLS = {"add": 500, "mul scalar": 500}  # in a row, in one turn

# (kind, most times what stock costs), from the table of targets.
TARGETS = {
    "add": (("ragged", 1.0), ("ours", 2.0), ("as_torch", 1.0)),
    "mul scalar": (("ragged", 0.5),),
    "AdamW foreach": (("ragged", 1.0),),
    "AdamW fused": (("ragged", 0.4),),
    "clip_grad_norm_ foreach": (("ragged", 1.0),),
}


@dataclass(frozen=True)
class Row:
    """Microseconds of one call, by kind."""

    name: str
    micros: dict[str, float]

    def ratio(self, kind: str) -> float:
        return self.micros[kind] / self.micros["stock"]

    def missed(self, tolerance: float) -> list[str]:
        """Name the kinds whose ratio exceeds its target by more than ``tolerance`` (relative)."""
        limits = TARGETS[self.name]
        return [kind for kind, limit in limits if self.ratio(kind) > limit * (1 + tolerance)]


def make(kind: str, whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return ``whole``, or this rank's part of it, as a tensor of ``kind``."""
    if kind == "plain":
        return whole[:6].clone()
    if kind == "stock":
        return torch_distribute(whole, mesh, [Shard(0)], src_data_rank=None)
    placement = RaggedShard((0,), UNITS) if kind == "ragged" else Shard(0)
    ours = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    return ours.as_torch() if kind == "as_torch" else ours


def add(kind: str, mesh: DeviceMesh) -> Callable[[], object]:
    x, y = (make(kind, torch.rand(ROWS, COLUMNS), mesh) for _ in range(2))
    return lambda: x + y


def mul_scalar(kind: str, mesh: DeviceMesh) -> Callable[[], object]:
    x = make(kind, torch.rand(ROWS, COLUMNS), mesh)
    return lambda: x * 2.0


def adamw(kind: str, mesh: DeviceMesh, **options: bool) -> Callable[[], object]:
    return torch.optim.AdamW(parameters(kind, mesh), **options).step


def clip(kind: str, mesh: DeviceMesh) -> Callable[[], object]:
    params = parameters(kind, mesh)
    return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)


def parameters(kind: str, mesh: DeviceMesh) -> list[torch.nn.Parameter]:
    params = [
        torch.nn.Parameter(make(kind, torch.rand(ROWS, COLUMNS), mesh)) for _ in range(PARAMS)
    ]
    for param in params:
        param.grad = param.detach().clone()
    return params


OPERATIONS: dict[str, Callable[[str, DeviceMesh], Callable[[], object]]] = {
    "add": add,
    "mul scalar": mul_scalar,
    "AdamW foreach": lambda kind, mesh: adamw(kind, mesh, foreach=True),
    "AdamW fused": lambda kind, mesh: adamw(kind, mesh, fused=True),
    "clip_grad_norm_ foreach": clip,
}


def measure(name: str, mesh: DeviceMesh, repeats: int) -> Row:
    """Time one operation on every kind, taking turns."""
    with torch.set_grad_enabled("AdamW" in name or "clip" in name):
        OPERATIONS[name]("stock", mesh)()  # so that no kind meets its own specs in torch's caches
        calls = {kind: OPERATIONS[name](kind, mesh) for kind in KINDS}
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        number = CALLS.get(name, 5)
        for call in (*calls.values(), *calls.values()):  # fill every cache
            call()
        gc.collect()
        gc.disable()
        try:
            for _ in range(repeats):
                for kind, call in calls.items():
                    start = time.process_time()
                    for _ in range(number):
                        call()
                    times[kind].append(1e6 * (time.process_time() - start) / number)
        finally:
            gc.enable()
    return Row(name, {kind: statistics.median(values) for kind, values in times.items()})


def table(rows: list[Row], tolerance: float = 0.0) -> str:
    """Return the rows as text: microseconds, then each ratio to stock and its target."""
    lines = [f"{'us of one call':<24}" + "".join(f"{kind:>10}" for kind in KINDS) + "   of stock"]
    for row in rows:
        missed = row.missed(tolerance)
        ratios = ", ".join(
            f"{kind} {row.ratio(kind):.2f} (<= {limit:g}{', MISSED' if kind in missed else ''})"
            for kind, limit in TARGETS[row.name]
        )
        cells = "".join(f"{row.micros[kind]:>10.1f}" for kind in KINDS)
        lines.append(f"{row.name:<24}{cells}   {ratios}")
    return "\n".join(lines)


def main() -> int:
    """Print the table; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="timings of each cell")
    parser.add_argument("--tolerance", type=float, default=0.1, help="noise allowed in a ratio")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = [measure(name, mesh, options.repeats) for name in OPERATIONS]
    dist.destroy_process_group()
    print(f"torch {torch.__version__}, {PARAMS} parameters where there are any")
    print(table(rows, options.tolerance))
    if options.json:
        values = {row.name: {"us": row.micros, "missed": row.missed(0)} for row in rows}
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": values}, indent=1))
    return int(any(row.missed(options.tolerance) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
