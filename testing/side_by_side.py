# SPDX-License-Identifier: Apache-2.0
"""Run one script on torch's FSDP2 and on ours, and compare all that a user can see."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

import vescale.fsdp
from testing.collectives import CountCollectives
from testing.models import batch, build, loss_of
from testing.ranks import DEVICE

KINDS = ("allgather", "reduce_scatter")


class Side:
    """One of the two implementations, under ``api``, and what a script saw of it."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.numbers: list[Any] = []  # losses and gradients
        self.counts: list[tuple[int, ...]] = []  # gathers and reductions of each counted part
        self.states: list[tuple[bool, ...]] = []  # whether modules held full parameters

    def model(self, seed: int = 0, **options: Any) -> nn.Module:
        """Return the language model, wrapped layer by layer and as a whole."""
        model = build(seed).to(DEVICE)
        model.scale = nn.Parameter(model.scale.detach().view(1))  # FSDP2 takes no scalars
        model.nothing = nn.Parameter(torch.zeros(1, 4, device=DEVICE))  # nor, in no_sync, nothing
        for layer in model.layers:
            self.api.fully_shard(layer, **options)
        return self.api.fully_shard(model, **options)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the collectives of a part of the script."""
        with CountCollectives() as comm:
            yield
        found = [(name.replace("all_g", "allg"), n) for name, n in comm.counts.items()]
        self.counts.append(
            tuple(sum(n for name, n in found if name.startswith(kind)) for kind in KINDS)
        )

    def look(self, *modules: nn.Module) -> None:
        """Note which modules hold full parameters now."""
        first = (next(module.parameters()) for module in modules)
        self.states.append(tuple(not isinstance(param, DTensor) for param in first))

    def step(self, model: nn.Module, step: int = 0) -> None:
        """Run forward and backward on a batch, and note the loss."""
        loss = loss_of(model, batch(step, dist.get_rank(), DEVICE))
        self.numbers.append(loss.item())
        loss.backward()

    def gradients(self, model: nn.Module) -> None:
        """Note the whole gradients by name, and None where there is none."""
        self.numbers.append(
            {
                name: None if param.grad is None else param.grad.full_tensor()
                for name, param in model.named_parameters()
                if param.numel()
            }
        )


def our_api() -> SimpleNamespace:
    """Return what ``vescale.fsdp`` exports, to wrap with torch's collectives: those are counted."""

    def fully_shard(module: Any, **options: Any) -> Any:
        wrapped = vescale.fsdp.fully_shard(module, **options)
        for each in wrapped if isinstance(wrapped, list) else [wrapped]:
            each.set_collectives("torch", recurse=False)
        return wrapped

    names = {name: getattr(vescale.fsdp, name) for name in vescale.fsdp.__all__}
    return SimpleNamespace(**{**names, "fully_shard": fully_shard})


def compare(script: Callable, *args: Any, fewer: bool = False) -> tuple[Side, Side]:
    """Run ``script(side, *args)`` on both: numbers and states are equal, and the collectives.

    With ``fewer`` ours may do with fewer collectives. Returns torch's side and ours.
    """
    theirs, ours = Side(torch_fsdp), Side(our_api())
    for side in (theirs, ours):
        script(side, *args)
    note = f"{script.__name__}{args}"
    assert len(theirs.numbers) == len(ours.numbers), note
    for number, (left, right) in enumerate(zip(theirs.numbers, ours.numbers, strict=True)):
        torch.testing.assert_close(
            right, left, rtol=1e-5, atol=1e-6, msg=lambda m, n=number: f"{note}, number {n}: {m}"
        )
    assert ours.states == theirs.states, note
    counts = f"{note}: gathers and reductions are {ours.counts}, of FSDP2 {theirs.counts}"
    if fewer:
        for mine, stock in zip(ours.counts, theirs.counts, strict=True):
            assert all(a <= b for a, b in zip(mine, stock, strict=True)), counts
    else:
        assert ours.counts == theirs.counts, counts
    return theirs, ours
