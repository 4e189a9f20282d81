# SPDX-License-Identifier: Apache-2.0
"""AdamW, AdamW8bit, Muon and SOAP on one sharded model: losses, bytes, state, time, in one run.

    python -m benchmarks.optimizers --ranks 2 --steps 150 --json result.json

Beside them Muon as it would be without this package: torch.optim.Muon on gathered matrices, every
rank doing all the work ("full tensors"), and on the Shard(0) parameters of torch's FSDP2. Bytes and
state are counts. Time is that of ``optimizer.step`` alone, the median, over AdamW's in the same
run; on shared CPUs it says little, and nothing about GPUs.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim import AdamW, Optimizer

from testing.collectives import CountCollectives
from vescale.dtensor import init_device_mesh
from vescale.fsdp import fully_shard, granularity_for
from vescale.fsdp.optim import SOAP, AdamW8bit, Muon, split_params

MUON = {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw"}
ADAM = {"lr": 0.003, "betas": (0.9, 0.95), "weight_decay": 0.0}
SYMBOLS = 64


class Net(nn.Module):
    """Predict the next symbol from the last four."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        self.first = nn.Linear(4 * width, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU())
            for _ in range(layers)
        )
        self.down = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(tokens).flatten(1))
        for up, down in zip(self.layers, self.down, strict=True):
            x = x + down(up(x))
        return self.head(x)


class FullTensorMuon(Optimizer):
    """What it takes without an exchange: gather every gradient, solve everything everywhere."""

    def __init__(self, params, **options) -> None:
        super().__init__(params, {})
        params = self.param_groups[0]["params"]
        self.wholes = [nn.Parameter(param.full_tensor().detach().clone()) for param in params]
        self.muon = torch.optim.Muon(self.wholes, **options)
        self.state = self.muon.state

    @torch.no_grad()
    def step(self) -> None:
        params = self.param_groups[0]["params"]
        for param, whole in zip(params, self.wholes, strict=True):
            whole.grad = param.grad.full_tensor()
        self.muon.step()
        for param, whole in zip(params, self.wholes, strict=True):
            start, end = param.placements[0].split(whole.shape, param.device_mesh.get_local_rank())
            param.to_local().copy_(whole.view(-1)[start:end])


@dataclass(frozen=True)
class Result:
    """One row. Bytes are those of one step of the optimizer, all ranks summed."""

    name: str
    losses: list[float]
    bytes_per_param: float
    state_bytes_per_param: float
    seconds: float


def with_adamw(make: Callable) -> Callable[[nn.Module], list[Optimizer]]:
    def optimizers(model: nn.Module) -> list[Optimizer]:
        matrices, rest = split_params(model)
        return [make(matrices), AdamW(rest, **ADAM)]

    return optimizers


CASES = {
    "AdamW": ("adamw", lambda model: [AdamW(model.parameters(), **ADAM)]),
    "AdamW8bit": ("adamw8bit", lambda model: [AdamW8bit(model.named_parameters(), **ADAM)]),
    "Muon": ("muon", with_adamw(lambda params: Muon(params, **MUON))),
    "SOAP": ("soap", with_adamw(lambda params: SOAP(params, lr=0.003))),
    "Muon, full tensors": ("muon", with_adamw(lambda params: FullTensorMuon(params, **MUON))),
    "torch Muon on FSDP2": (None, with_adamw(lambda params: torch.optim.Muon(params, **MUON))),
}


def local_nbytes(tensor: torch.Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).nbytes


def run(name: str, width: int, layers: int, steps: int) -> Result:
    """Train one case; collective, on the default process group."""
    kind, make = CASES[name]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Net(width, layers)
    if kind is None:
        torch_fully_shard(model, mesh=mesh)
    else:
        fully_shard(model, mesh=mesh, granularity=granularity_for(kind))
    optimizers = make(model)
    numel = sum(param.numel() for param in model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, seconds = [], []
    for _ in range(steps):
        tokens = torch.randint(0, SYMBOLS, (64, 4), generator=generator)
        target = (3 * tokens[:, 3] + tokens[:, 2] * (tokens[:, 1] > 31)) % SYMBOLS
        loss = nn.functional.cross_entropy(model(tokens), target)
        loss.backward()
        began = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        seconds.append(time.perf_counter() - began)
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    model(torch.zeros(64, 4, dtype=torch.int64)).sum().backward()
    with CountCollectives() as comm:
        for optimizer in optimizers:
            optimizer.step()
    state = [
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    counts = torch.tensor([comm.nbytes, sum(map(local_nbytes, state))])
    dist.all_reduce(counts)
    sent, stored = (count / numel for count in counts.tolist())
    return Result(name, losses, sent, stored, statistics.median(seconds))


def measure(width: int, layers: int, steps: int) -> list[Result]:
    """Return the rows of the table; collective."""
    return [run(name, width, layers, steps) for name in CASES]


def table(results: list[Result]) -> str:
    """Return the rows as text; losses at the first, middle and last steps (means of five)."""
    names = ("loss: start", "middle", "end", "bytes/param", "state", "time")
    widths = (12, 8, 8, 13, 8, 8)
    titles = (f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    lines = [" " * 22 + "".join(titles)]
    for row in results:
        half = len(row.losses) // 2
        spans = (row.losses[:5], row.losses[half : half + 5], row.losses[-5:])
        start, middle, end = (statistics.mean(span) for span in spans)
        lines.append(
            f"{row.name:22}{start:>12.3f}{middle:>8.3f}{end:>8.3f}{row.bytes_per_param:>13.2f}"
            f"{row.state_bytes_per_param:>8.2f}{row.seconds / results[0].seconds:>7.1f}x"
        )
    return "\n".join(lines)


def main_rank(
    rank: int, world_size: int, sizes: tuple[int, int, int], path: str, result: str | None
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    results = measure(*sizes)
    if rank == 0:
        width, layers, steps = sizes
        print(f"{world_size} ranks, width {width}, {layers} layers, {steps} steps")
        print(table(results))
        if result:
            run = {"ranks": world_size, "width": width, "layers": layers, "steps": steps}
            rows = [asdict(row) for row in results]
            Path(result).write_text(json.dumps({**run, "cases": rows}, indent=1))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", help="write all losses and counts there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sizes = (args.width, args.layers, args.steps)
        job = (args.ranks, sizes, f"{scratch}/store", args.json)
        mp.start_processes(main_rank, job, nprocs=args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
