# SPDX-License-Identifier: Apache-2.0
"""What states cost to get out, save, load and hand in: ours against FSDP2 with torch's helpers.

    python -m benchmarks.checkpoints --ranks 2 --model base

Times are ratios: in every round all ways run one after the other, and the median over the rounds of
each time over FSDP2's of the same round is shown, with its quartiles. Memory is counted, not
measured: the most bytes of tensors that a rank holds at once beside its shards, over the bytes of
the whole parameters.
"""

import argparse
import copy
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_state_dict
import torch.multiprocessing as mp
from examples.lm.model import Decoder, Shape
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor

from testing.memory import PeakBytes
from vescale.fsdp import fully_shard, iter_full_parameters
from vescale.fsdp import state_dict as our_state_dict
from vescale.fsdp.checkpoint import CheckpointManager

SHAPES = {
    "tiny": Shape(dim=32, layers=2, heads=2, hidden=88),
    "base": Shape(dim=256, layers=4, heads=4, hidden=704),
    "wide": Shape(dim=1024, layers=4, heads=8, hidden=2816),
}
FULL = torch_state_dict.StateDictOptions(full_state_dict=True)
ON_RANK0 = torch_state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK0 = torch_state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@dataclass(frozen=True)
class Row:
    """One way to do a thing. Ratios are to the first way of it; ``peak`` is in whole models."""

    thing: str
    way: str
    ratio: float
    quartiles: tuple[float, float]
    seconds: float
    peak: float


class Side:
    """A model with AdamW that made one step, by us or by FSDP2."""

    def __init__(self, shard: Callable, shape: Shape) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Decoder(shape, 64, tied=True)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.layers:
            shard(layer, mesh=mesh)
        shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(shape: Shape, rounds: int, folder: Path, bucket_bytes: int) -> list[Row]:
    """Return one row for each way. Collective; ``folder`` is reached by all ranks."""
    stock, ours = Side(fsdp2_fully_shard, shape), Side(fully_shard, shape)
    whole = sum(p.numel() * p.element_size() for p in ours.model.parameters())
    plain = CheckpointManager(folder / "plain", keep_last=1, checksums=False)
    summed = CheckpointManager(folder / "summed", keep_last=1)
    behind = CheckpointManager(folder / "behind", keep_last=1, asynchronous=True)
    given = {}
    wholes = our_state_dict.get_state_dict(ours.model, ours.optimizer, options=ON_RANK0)

    def out(side: Side, helpers, options) -> None:
        helpers.get_model_state_dict(side.model, options=options)

    def stream(dtype: torch.dtype | None) -> None:
        for _name, _whole in iter_full_parameters(
            ours.model, dtype=dtype, bucket_bytes=bucket_bytes
        ):
            pass

    def save(side: Side, helpers) -> None:
        state = helpers.get_state_dict(side.model, side.optimizer)
        path = folder / f"dcp-{side is ours}"
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        dcp.save(dict(zip(("model", "optimizer"), state, strict=True)), checkpoint_id=path)

    def load(side: Side, helpers) -> None:
        state = helpers.get_state_dict(side.model, side.optimizer)
        named = dict(zip(("model", "optimizer"), state, strict=True))
        dcp.load(named, checkpoint_id=folder / f"dcp-{side is ours}")
        helpers.set_model_state_dict(side.model, named["model"])
        helpers.set_optimizer_state_dict(side.model, side.optimizer, named["optimizer"])

    def prepare() -> None:
        given["model"] = dict(wholes[0])
        given["optimizer"] = copy.copy(wholes[1])

    def hand_in(side: Side, helpers) -> None:
        prepare()
        helpers.set_model_state_dict(side.model, given["model"], options=FROM_RANK0)

    manager_save = {
        name: lambda m=m: m.save(1, ours.model, ours.optimizer)
        for name, m in (("no checksums", plain), ("checksums", summed), ("behind", behind))
    }
    things: dict[str, dict[str, Callable[[], object]]] = {
        "weights out": {
            "FSDP2, whole on every rank": lambda: out(stock, torch_state_dict, FULL),
            "FSDP2, whole on rank 0": lambda: out(stock, torch_state_dict, ON_RANK0),
            "ours, whole on every rank": lambda: out(ours, our_state_dict, FULL),
            "ours, whole on rank 0": lambda: out(ours, our_state_dict, ON_RANK0),
            "ours, streamed": lambda: stream(None),
            "ours, streamed in bfloat16": lambda: stream(torch.bfloat16),
        },
        "save": {
            "FSDP2, DCP": lambda: save(stock, torch_state_dict),
            "ours, DCP": lambda: save(ours, our_state_dict),
            "ours, manager without checksums": manager_save["no checksums"],
            "ours, manager": manager_save["checksums"],
            "ours, manager, until it returns": manager_save["behind"],
        },
        "load": {
            "FSDP2, DCP": lambda: load(stock, torch_state_dict),
            "ours, DCP": lambda: load(ours, our_state_dict),
            "ours, manager without checksums": lambda: plain.load(ours.model, ours.optimizer),
            "ours, manager": lambda: summed.load(ours.model, ours.optimizer),
        },
        "whole model in from rank 0": {
            "FSDP2": lambda: hand_in(stock, torch_state_dict),
            "ours": lambda: hand_in(ours, our_state_dict),
        },
    }
    rows = []
    for thing, ways in things.items():
        rows += compare(thing, ways, rounds, whole, after=behind.wait)
    check_equal(stock, ours)
    return rows


def compare(
    thing: str, ways: dict[str, Callable], rounds: int, whole: int, after: Callable
) -> list[Row]:
    """Time all ways in turn, ``rounds`` times; count memory in a round of its own."""
    peaks = []
    for way in ways.values():
        with PeakBytes() as memory:
            way()
        after()
        peaks.append(_largest(memory.peak) / whole)
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for place, way in enumerate(ways.values()):
            dist.barrier()
            began = time.perf_counter()
            way()
            seconds[place].append(_largest(time.perf_counter() - began))
            after()
    rows = []
    for name, mine, peak in zip(ways, seconds, peaks, strict=True):
        ratios = sorted(t / first for t, first in zip(mine, seconds[0], strict=True))
        quartiles = (ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4])
        rows.append(
            Row(thing, name, statistics.median(ratios), quartiles, statistics.median(mine), peak)
        )
    return rows


def check_equal(stock: Side, ours: Side) -> None:
    """Raise RuntimeError unless both sides have the same parameters at the end."""
    mine = ours.model.state_dict()
    for name, value in stock.model.state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if not torch.equal(mine[name].full_tensor(), value):
            raise RuntimeError(f"{name} differs between the sides; a state went astray.")


def _largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def print_table(rows: list[Row]) -> None:
    print(f"{'':34}{'time over FSDP2':>16}{'quartiles':>16}{'ms':>9}{'peak memory':>13}")
    thing = None
    for row in rows:
        if row.thing != thing:
            thing = row.thing
            print(thing)
        low, high = row.quartiles
        print(
            f"  {row.way:32}{row.ratio:>16.2f}{f'{low:.2f} to {high:.2f}':>16}"
            f"{row.seconds * 1e3:>9.1f}{row.peak:>13.2f}"
        )


def main_rank(rank: int, world_size: int, args: argparse.Namespace, scratch: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{scratch}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    rows = measure(SHAPES[args.model], args.rounds, Path(scratch), args.bucket_bytes)
    if rank == 0:
        print(f"{args.model}, {world_size} ranks; peak memory in whole models")
        print_table(rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=SHAPES, default="base")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bucket-bytes", type=int, default=1 << 20)
    parser.add_argument("--folder", help="where to write checkpoints (default: temporary)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        mp.start_processes(
            main_rank, (args.ranks, args, scratch), nprocs=args.ranks, start_method="spawn"
        )


if __name__ == "__main__":
    main()
