# SPDX-License-Identifier: Apache-2.0
"""What a training step costs besides the model: ours against torch's FSDP2, in one run.

    python -m benchmarks.fsdp_vs_fsdp2 --ranks 2 --json result.json

Both wrap the same Llama-style model alike and train on the same tokens. Counters: collectives,
bytes that the ranks' payloads hold, bytes that tensor operators copy in forward and backward less
what the unwrapped model copies there, operators dispatched, page faults. Times are ratios of steps
taken in turn; on a shared machine they scatter.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from examples.lm.model import SIZES, Decoder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from vescale.fsdp import Rows, fully_shard
from vescale.fsdp.units import param_groups

COPIES = {"copy_", "_to_copy", "clone", "cat", "_chunk_cat", "chunk_cat", "all_gather_copy_in"}
SPLITS = {"split_with_sizes_copy"}
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Count(TorchDispatchMode):
    """Count operators, bytes written by copies, and collectives with their payload's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.copied = self.payload = 0
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            self.collectives[name.strip("_")] += 1
            full = args[0] if "allgather" in name else args[1]
            self.payload += full.nbytes
            return out
        self.operators += 1
        if name in COPIES:
            written = args[0] if name == "copy_" else out
            written = (written,) if isinstance(written, torch.Tensor) else written or ()
            self.copied += sum(t.nbytes for t in written)
        elif name in SPLITS:
            pieces = (kwargs or {}).get("out") or out
            self.copied += sum(t.nbytes for t in pieces)
        return out


@dataclass
class Side:
    """One way to run the model, and what was counted."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Count = field(default_factory=Count)
    backward: Count = field(default_factory=Count)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)


def tokens(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 256, (4, 129), generator=generator)


def make(name: str, size: str, shard, **options) -> Side:
    torch.manual_seed(0)
    model = Decoder(SIZES[size], max_length=128)
    if shard is not None:
        for layer in model.layers:
            shard(layer, **options)
        shard(model, **options)
    return Side(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def step(side: Side, index: int, *, count: bool) -> None:
    batch = tokens(index, dist.get_rank())
    begin, faults = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with side.forward if count else torch.enable_grad():
        logits = side.model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    with side.backward if count else torch.enable_grad():
        loss.backward()
    side.optimizer.step()
    side.optimizer.zero_grad()
    side.losses.append(loss.item())
    if not count and index > 1:
        side.seconds.append(time.perf_counter() - begin)
        side.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


def measure(size: str, policy_name: str, steps: int) -> dict:
    """Return the counters of both sides on this rank; collective."""
    policy, mesh = POLICIES[policy_name], init_device_mesh("cpu", (dist.get_world_size(),))
    plain = make("unwrapped", size, None)
    if policy.param_dtype is not None:
        plain.model.to(policy.param_dtype)
    ours = make("vescale", size, fully_shard, mesh=mesh, mp_policy=policy, granularity=Rows(1))
    fsdp2 = make("fsdp2", size, fsdp2_fully_shard, mesh=mesh, mp_policy=policy)
    for index in range(steps):
        for side in (ours, fsdp2) if index % 2 else (fsdp2, ours):
            step(side, index, count=False)
    for side in (plain, ours, fsdp2):
        step(side, steps, count=True)
    numel = sum(p.numel() for p in plain.model.parameters())
    compute_bytes = numel * (policy.param_dtype or torch.float32).itemsize
    gradient_bytes = numel * (policy.reduce_dtype or policy.param_dtype or torch.float32).itemsize
    result = {"parameters": numel, "world_size": dist.get_world_size(), "policy": policy_name}
    for side in (ours, fsdp2):
        gathers = sum(n for name, n in side.forward.collectives.items() if "allgather" in name)
        around_gather = side.forward.copied - plain.forward.copied
        everything = around_gather + side.backward.copied - plain.backward.copied
        result[side.name] = {
            "collectives": sum((side.forward.collectives + side.backward.collectives).values()),
            "gathers in forward": gathers,
            "payload bytes / parameter bytes": round(
                (side.forward.payload + side.backward.payload)
                / (2 * compute_bytes + gradient_bytes),
                4,
            ),
            "bytes copied around forward's gathers / parameter bytes": round(
                around_gather / compute_bytes, 4
            ),
            "bytes copied in the step / parameter bytes": round(everything / compute_bytes, 4),
            "operators added to the model's": side.forward.operators
            + side.backward.operators
            - plain.forward.operators
            - plain.backward.operators,
            "page faults per step": statistics.median(side.faults),
        }
    pairs = zip(ours.seconds, fsdp2.seconds, strict=True)
    result["step time, vescale / fsdp2 (median of pairs)"] = round(
        statistics.median(a / b for a, b in pairs), 3
    )
    losses = zip(ours.losses, fsdp2.losses, strict=True)
    result["largest relative loss difference"] = max(abs(a - b) / b for a, b in losses)
    result["padding of the groups"] = {
        group.name or "(root)": round(group.plan.padding, 6) for group in param_groups(ours.model)
    }
    return result


def main_rank(rank: int, args: argparse.Namespace, path: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    results = [measure(args.model_size, policy, args.steps) for policy in POLICIES]
    if rank == 0:
        for result in results:
            print_table(result)
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def print_table(result: dict) -> None:
    print(
        f"\n{result['policy']}, {result['parameters']:,} parameters, {result['world_size']} ranks"
    )
    print(f"{'':58}{'vescale':>10}{'fsdp2':>10}")
    for name, value in result["vescale"].items():
        print(f"{name:58}{value:>10}{result['fsdp2'][name]:>10}")
    for name in (
        "step time, vescale / fsdp2 (median of pairs)",
        "largest relative loss difference",
    ):
        print(f"{name:58}{result[name]:>10.3g}")
    print("padding of the groups:", result["padding of the groups"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model-size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        job = (args, f"{scratch}/store")
        mp.start_processes(main_rank, job, nprocs=args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
