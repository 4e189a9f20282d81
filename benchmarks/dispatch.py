# SPDX-License-Identifier: Apache-2.0
"""What an operator costs besides its arithmetic: ours against torch's DTensor, in one process.

    python -m benchmarks.dispatch [--repeats 15] [--json result.json]

Six kinds of small tensors go through the same operators on a fake process group of 4 ranks, which
sends nothing: plain tensors; torch's DTensor as Shard(0), or as the row says; ours as RaggedShard,
where the operator has one; ours as torch's; what ``as_torch()`` makes of the latter; and what
``parallelize`` makes of a parameter, with random numbers of one device switched on. CPU time of one
thread. Repeats of all kinds take turns, and a cell is their median, so load on the machine moves
all cells of a row alike. Exits with 1 if a ratio misses its target by more than noise may explain
(--tolerance).
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Placement
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.dtensor import (
    DeviceMesh,
    Plan,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize,
    random,
)

RANKS, RANK = 4, 1
ROWS, COLUMNS = 16, 8
UNITS = (1, 3, 2, 2)  # rank 1 holds 6 rows of 16
PARAMS = 100
KINDS = ("plain", "stock", "ragged", "ours", "as_torch", "plan")

# (kind, most times what stock costs), from the table of targets.
TARGETS = {
    "add": (("ragged", 1.0), ("ours", 2.0), ("as_torch", 1.0), ("plan", 1.05)),
    "mul scalar": (("ragged", 0.5),),
    "AdamW foreach": (("ragged", 1.0),),
    "AdamW fused": (("ragged", 0.4),),
    "clip_grad_norm_ foreach": (("ragged", 1.0),),
    # The last two must keep torch's fast path.
    "mm, sharded": (("as_torch", 1.05), ("plan", 1.05)),
    "mm, replicated": (("as_torch", 1.05), ("plan", 1.05)),
    "softmax, sharded": (("as_torch", 1.05), ("plan", 1.05)),
    "softmax, replicated": (("as_torch", 1.05), ("plan", 1.05)),
    "layer_norm, sharded": (("as_torch", 1.05), ("plan", 1.05)),
    "layer_norm, replicated": (("as_torch", 1.05), ("plan", 1.05)),
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


def make(
    kind: str, whole: torch.Tensor, mesh: DeviceMesh, placement: Placement | None = None
) -> torch.Tensor:
    """Return ``whole``, or this rank's part of it, as a tensor of ``kind``."""
    placement = Shard(0) if placement is None else placement
    if kind == "plain":
        return whole.clone() if placement.is_replicate() else whole[:6].clone()
    if kind == "stock":
        return torch_distribute(whole, mesh, [placement], src_data_rank=None)
    if kind == "plan":
        holder = torch.nn.ParameterList([whole])
        parallelize(holder, mesh, Plan().param("0", placement), src_data_rank=None)
        return holder[0]
    if kind == "ragged":
        placement = RaggedShard((0,), UNITS)
    ours = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    return ours.as_torch() if kind == "as_torch" else ours


def add(kind: str, mesh: DeviceMesh) -> Callable[[], object]:
    x, y = (make(kind, torch.rand(ROWS, COLUMNS), mesh) for _ in range(2))
    return lambda: x + y


def plain_operator(
    call: Callable[..., object], placement: Placement, kind: str, mesh: DeviceMesh
) -> Callable[[], object] | None:
    """Return ``call(x [ROWS, COLUMNS], w [COLUMNS, COLUMNS], b [COLUMNS])``; w, b replicated."""
    if kind == "ragged":
        return None
    x = make(kind, torch.rand(ROWS, COLUMNS), mesh, placement)
    w = make(kind, torch.rand(COLUMNS, COLUMNS), mesh, Replicate())
    b = make(kind, torch.rand(COLUMNS), mesh, Replicate())
    return lambda: call(x, w, b)


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


CALLED = {
    "mm": lambda x, w, b: torch.mm(x, w),
    "softmax": lambda x, w, b: torch.softmax(x, 1),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (COLUMNS,), b, b),
}
OPERATIONS: dict[str, Callable[[str, DeviceMesh], Callable[[], object] | None]] = {
    "add": add,
    "mul scalar": mul_scalar,
    "AdamW foreach": lambda kind, mesh: adamw(kind, mesh, foreach=True),
    "AdamW fused": lambda kind, mesh: adamw(kind, mesh, fused=True),
    "clip_grad_norm_ foreach": clip,
    **{
        f"{name}, {word}": partial(plain_operator, call, placement)
        for name, call in CALLED.items()
        for word, placement in (("sharded", Shard(0)), ("replicated", Replicate()))
    },
}


def measure(name: str, mesh: DeviceMesh, repeats: int) -> Row:
    """Time one operation on every kind that has it, taking turns."""
    optimizer = "AdamW" in name or "clip" in name
    with torch.set_grad_enabled(optimizer), random.use_mode("off"):
        # Some other tensors first, so that no kind meets its own specs in torch's caches.
        OPERATIONS[name]("stock", mesh)()
        calls = {kind: OPERATIONS[name](kind, mesh) for kind in KINDS}
        calls = {kind: call for kind, call in calls.items() if call is not None}
        times: dict[str, list[float]] = {kind: [] for kind in calls}
        number = 5 if optimizer else 500
        for call in (*calls.values(), *calls.values()):  # fill every cache
            call()
        gc.collect()
        gc.disable()
        try:
            for _ in range(repeats):
                for kind, call in calls.items():
                    with random.use_mode("device") if kind == "plan" else nullcontext():
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
        cells = "".join(
            f"{row.micros[kind]:>10.1f}" if kind in row.micros else f"{'-':>10}" for kind in KINDS
        )
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
