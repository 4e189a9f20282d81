# SPDX-License-Identifier: Apache-2.0
"""Does an installed package work? ``python -m tools.release_installed fsdp``, by the Python that
has it. Needs nothing but what the package brings.
"""

import importlib
import importlib.metadata
import pkgutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.findings import Finding, report


def findings(name: str) -> Iterator[Finding]:
    """Yield what fails: where it is imported from, each of its modules, a step on one rank."""
    version = importlib.metadata.version(f"vescale-{name}")
    beside = " and ".join(f"{x} {importlib.metadata.version(x)}" for x in ("torch", "numpy"))
    package = importlib.import_module(f"vescale.{name}")
    place, site = Path(str(package.__file__)), Path(sysconfig.get_path("purelib"))
    problem = "" if place.is_relative_to(site) else f"comes from {place}, not from {site}"
    yield f"imports vescale-{name} {version} beside {beside}", problem
    walked = pkgutil.walk_packages(package.__path__, f"vescale.{name}.")
    modules = [module.name for module in walked if not module.name.endswith(".__main__")]
    problems = filter(None, (failure(importlib.import_module, module) for module in modules))
    yield f"imports all its {len(modules)} modules", "; ".join(problems)
    missing = [text for text in package.__all__ if not hasattr(package, text)]
    yield "has what __all__ names", f"lacks {missing}" if missing else ""
    yield "works on one rank", failure(on_one_rank, STEPS[name])


def failure(function: Callable, *args: object) -> str:
    """Return what ``function`` raises, as text; "" if nothing."""
    try:
        function(*args)
    except Exception as error:
        return f"{', '.join(map(str, args))}: {type(error).__name__}: {error}"
    return ""


def on_one_rank(step: Callable[[], None]) -> None:
    """Run ``step`` in a process group of this process alone."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            step()
        finally:
            dist.destroy_process_group()


def move_a_ragged_tensor() -> None:
    import torch

    import vescale.dtensor as vd

    mesh = vd.init_device_mesh("cpu", (1,))
    whole = torch.arange(12.0).view(4, 3)
    ragged = vd.distribute_tensor(whole, mesh, [vd.RaggedShard((0,), (1,))])
    if not torch.equal(ragged.redistribute(placements=[vd.Shard(1)]).full_tensor(), whole):
        raise RuntimeError("a ragged tensor came back with other values")


def train_a_sharded_model() -> None:
    import torch
    from torch import nn

    from vescale.fsdp import Rows, clip_grad_norm_, fully_shard
    from vescale.fsdp.optim import Muon, split_params

    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)), granularity=Rows(4))
    before = [p.full_tensor().clone() for p in model.parameters()]
    matrices, rest = split_params(model)
    optimizers = [Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
    model(torch.randn(4, 8)).square().mean().backward()
    clip_grad_norm_(model, 1.0)
    for optimizer in optimizers:
        optimizer.step()
    after = [p.full_tensor() for p in model.parameters()]
    if any(map(torch.equal, before, after)):
        raise RuntimeError("a step left a parameter as it was")


def use_the_old_names() -> None:
    import torch

    from vescale.legacy import Shard, distribute_tensor, vescale_all_gather

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    whole = torch.arange(12.0).view(4, 3)
    gathered = vescale_all_gather(distribute_tensor(whole, mesh, [Shard(0)]))
    if not torch.equal(gathered.to_local(), whole):
        raise RuntimeError("a gathered tensor came back with other values")


STEPS = {
    "dtensor": move_a_ragged_tensor,
    "fsdp": train_a_sharded_model,
    "legacy": use_the_old_names,
}


if __name__ == "__main__":
    print(f"vescale-{sys.argv[1]}, installed:", flush=True)
    sys.exit(1 if report(findings(sys.argv[1])) else 0)
