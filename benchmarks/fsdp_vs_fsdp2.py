# SPDX-License-Identifier: Apache-2.0
"""What a training step costs with each way of data parallelism, all of them in one run.

    python -m benchmarks.fsdp_vs_fsdp2 --ranks 2 3 4 --models llama moe --json result.json

The same model, wrapped alike, trains on the same tokens with

- ddp: torch's DistributedDataParallel;
- fsdp2: torch's fully_shard;
- fsdp2p: the same, given our collectives for gloo by its own setters, to compare like with like;
- stock: ours, with gloo's own collectives as fsdp2 has them;
- vescale: ours, with the collectives that it chooses on gloo;
- with ``--also zero3``, DeepSpeed's ZeRO-3, if it is installed.

Steps are taken in turn, in an order that turns too, and times are the medians over all rounds of
the ratio to fsdp2's step of that round: the slowest rank's. On a shared machine they scatter; the
CPU time of all threads of all ranks scatters less, and shows no waiting.

Everything else is counted in one more step, memory without the optimizer. Bytes are in parts of
the parameters'; copies, operators and allocations are those of the step less those of the same
model unwrapped. Saved tensors that pass hooks are no operators and counted apart. With ``--gpu``
one GPU pretends to be one of 64, by a process group that does not communicate.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks import step_zero3
from benchmarks.step_counters import Count, memory_of
from benchmarks.step_models import SHAPES, build, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from vescale.fsdp import fully_shard
from vescale.fsdp.direct_collectives import DirectCollectives
from vescale.fsdp.units import param_groups

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
SIDES = ("ddp", "fsdp2", "fsdp2p", "stock", "vescale")


class _Fresh:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class DirectGather(_Fresh, AllGather):
    """Our gather for gloo, as FSDP2 takes it."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        DirectCollectives(group).all_gather(output_tensor, input_tensor).wait()


class DirectReduce(_Fresh, ReduceScatter):
    """Our reduction for gloo, as FSDP2 takes it, which asks for an average."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        direct = DirectCollectives(group)
        direct.reduce_scatter(output_tensor, input_tensor, dist.ReduceOp.SUM).wait()
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


@dataclass
class Side:
    """One way to train the model, and what was seen of it."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Count = field(default_factory=Count)
    backward: Count = field(default_factory=Count)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    peak: int = 0
    allocations: int = 0

    def step(self, index: int, *, count: bool = False) -> None:
        """Train on batch ``index``."""
        self.losses.append(self.differentiate(index, count=count))
        self.finish()

    def backward_of(self, loss: torch.Tensor) -> None:
        """Differentiate ``loss``."""
        loss.backward()

    def finish(self) -> None:
        """Take the step of the optimizer, and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def differentiate(self, index: int, *, count: bool = False) -> float:
        """Run forward and backward, and return the loss."""
        batch = tokens(index, dist.get_rank())
        with self.forward if count else torch.enable_grad():
            logits = self.model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        with self.backward if count else torch.enable_grad():
            self.backward_of(loss)
        return loss.item()

    def timed_step(self, index: int) -> None:
        """Train, and note the time and the page faults."""
        dist.barrier()
        begin, faults = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        cpu = time.process_time()
        self.step(index)
        self.seconds.append(time.perf_counter() - begin)
        self.cpu_seconds.append(time.process_time() - cpu)
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)

    def kept(self) -> Iterator[torch.Tensor]:
        """Yield what lives between two steps."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [t for s in self.optimizer.state.values() for t in s.values()]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                yield tensor.to_local() if hasattr(tensor, "to_local") else tensor


class ZeroSide(Side):
    """DeepSpeed's engine, which has methods of its own for a step."""

    def backward_of(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def finish(self) -> None:
        self.model.step()

    def kept(self) -> Iterator[torch.Tensor]:
        return step_zero3.kept(self.model)


def make(name: str, kind: str, size: str, policy: MixedPrecisionPolicy) -> Side:
    """Return the side ``name``; "alone" is the model unwrapped, in the dtype it computes in."""
    model, mesh = build(kind, size), init_device_mesh("cpu", (dist.get_world_size(),))
    if name == "zero3":
        if policy.param_dtype is not None:
            raise ValueError("zero3 is measured in fp32 only; leave out --policies bf16.")
        return ZeroSide(name, step_zero3.wrap(model, lr=1e-3), None)
    if name in ("alone", "ddp"):
        model.to(policy.param_dtype or torch.float32)
    if name == "ddp":
        model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    elif name != "alone":
        ours = name in ("stock", "vescale")
        shard: Callable = fully_shard if ours else fsdp2_fully_shard
        units = [*model.layers, model]
        for unit in units:
            shard(unit, mesh=mesh, mp_policy=policy)
        if name == "stock":
            model.set_collectives("torch")
        if name == "fsdp2p":
            for unit in units:
                unit.set_custom_all_gather(DirectGather())
                unit.set_custom_reduce_scatter(DirectReduce())
    return Side(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def measure(
    kind: str, size: str, policy_name: str, rounds: int, names: tuple[str, ...] = SIDES
) -> dict:
    """Return what was seen of every side; collective."""
    policy = POLICIES[policy_name]
    plain = make("alone", kind, size, policy)
    sides = [make(name, kind, size, policy) for name in names]
    for index in range(2):
        for side in (plain, *sides):
            side.step(index)
    for index in range(rounds):
        turn = index % len(sides)
        for side in (*sides[turn:], *sides[:turn]):
            side.timed_step(2 + index)
    for side in (plain, *sides):
        side.step(rounds + 2, count=True)
        side.peak, side.allocations = memory_of(
            lambda s=side: s.differentiate(rounds + 3), side.kept()
        )
        side.finish()
    numel = sum(p.numel() for p in plain.model.parameters())
    result = {
        "model": kind,
        "parameters": numel,
        "world_size": dist.get_world_size(),
        "policy": policy_name,
        "rounds": rounds,
    }
    result["sides"] = {
        side.name: _seen(side, plain, sides[names.index("fsdp2")], numel, policy) for side in sides
    }
    ours = next((side for side in sides if side.name in ("stock", "vescale")), None)
    if ours is not None:
        result["padding of the groups"] = {
            group.name or "(root)": round(group.plan.padding, 6)
            for group in param_groups(ours.model)
        }
    return result


def _seen(
    side: Side, plain: Side, fsdp2: Side, numel: int, policy: MixedPrecisionPolicy
) -> dict[str, float]:
    compute = numel * (policy.param_dtype or torch.float32).itemsize
    reduced = numel * (policy.reduce_dtype or policy.param_dtype or torch.float32).itemsize
    seconds, theirs = (_over_ranks(s.seconds, dist.ReduceOp.MAX) for s in (side, fsdp2))
    cpu, their_cpu = (_over_ranks(s.cpu_seconds, dist.ReduceOp.SUM) for s in (side, fsdp2))
    around_gather = side.forward.copied - plain.forward.copied
    around_gradient = side.backward.copied - plain.backward.copied
    payload = side.forward.payload + side.backward.payload
    operators = side.forward.operators + side.backward.operators
    detached = side.forward.detached + side.backward.detached
    passes = 2 * (len(build_units(side.model)) or 1)
    differences = (abs(a - b) / b for a, b in zip(side.losses, fsdp2.losses, strict=True))
    return {
        "step / fsdp2's": round(_ratio(seconds, theirs), 3),
        "CPU time / fsdp2's": round(_ratio(cpu, their_cpu), 3),
        "step, ms": round(1e3 * statistics.median(seconds), 1),
        "collectives": side.forward.collectives + side.backward.collectives,
        "payload": round(payload / (2 * compute + reduced), 4),
        "copied in forward": round(around_gather / compute, 3),
        "copied in backward": round(around_gradient / compute, 3),
        "operators added": operators - plain.forward.operators - plain.backward.operators,
        "saved tensors handed back": detached - plain.forward.detached - plain.backward.detached,
        "large allocations added per unit and pass": round(
            (side.allocations - plain.allocations) / passes, 2
        ),
        "page faults": statistics.median(side.faults),
        "peak tensor memory / fsdp2's": round(side.peak / fsdp2.peak, 3),
        "largest relative loss difference": max(differences),
    }


def build_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are wrapped, or would be."""
    model = getattr(model, "module", model)
    return [*model.layers, model]


def _over_ranks(seconds: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    """Return each round's time, reduced over the ranks."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=op)
    return times.tolist()


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def print_table(result: dict) -> None:
    print(
        f"\n{result['model']}, {result['policy']}, {result['parameters']:,} parameters, "
        f"{result['world_size']} ranks, {result['rounds']} rounds"
    )
    sides = result["sides"]
    print(f"{'':44}" + "".join(f"{name:>10}" for name in sides))
    for row in next(iter(sides.values())):
        print(f"{row:44}" + "".join(f"{side[row]:>10.4g}" for side in sides.values()))
    print("padding of the groups:", result["padding of the groups"], flush=True)


def main_rank(rank: int, args: argparse.Namespace, ranks: int, path: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/store{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    results = []
    for kind in args.models:
        for policy in args.policies:
            names = (*SIDES, *args.also)
            results.append(measure(kind, args.size, policy, args.rounds, names))
            if rank == 0:
                print_table(results[-1])
    if rank == 0:
        Path(path, f"result{ranks}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--models", choices=("llama", "moe"), nargs="+", default=["llama", "moe"])
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=["fp32"])
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--also", choices=("zero3",), nargs="+", default=[])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    if args.gpu:
        from benchmarks import step_on_gpu

        results = [step_on_gpu.measure(kind, args.size) for kind in args.models]
    else:
        with tempfile.TemporaryDirectory() as scratch:
            for ranks in args.ranks:
                job = (args, ranks, scratch)
                mp.start_processes(main_rank, job, nprocs=ranks, start_method="fork")
                results += json.loads(Path(scratch, f"result{ranks}.json").read_text())
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
