# SPDX-License-Identifier: Apache-2.0
"""Find out before anything is written that the ranks are not about to write the same state."""

import hashlib
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale.dtensor.matching import leaves, name_of
from vescale.fsdp.phases import waiting

MOST_NAMES = 10
_PLAIN = (bool, int, float, str, type(None))


def check_alike(state: dict[str, Any], group: dist.ProcessGroup, *, same_keys: bool = True) -> None:
    """Raise ValueError on every rank of ``group`` where their states differ in more than values.

    Compared are keys, shapes, dtypes, placements and mesh shapes of tensors, and numbers, texts and
    lists of them by value. With ``same_keys=False`` only what several ranks have is compared, as
    with pipeline stages. Costs one all-gather of a digest, and more only to tell what differs.
    """
    mine = {name_of(path): describe(value) for path, value in leaves(state)}
    text = "\n".join(f"{key}: {mine[key]}" for key in sorted(mine))
    digests = everyones(hashlib.sha256(text.encode()).hexdigest(), group)
    if len(set(digests)) == 1:
        return
    problems = differences(everyones(mine, group), same_keys)
    if problems:
        more = len(problems) - MOST_NAMES
        problems = problems[:MOST_NAMES] + ([f"and {more} more"] if more > 0 else [])
        raise ValueError(
            "the ranks do not have the same state, so nothing was written: "
            + "; ".join(problems)
            + "."
        )


def differences(states: list[dict[str, str]], same_keys: bool) -> list[str]:
    """Return what differs between the descriptions of all ranks, one sentence for each key."""
    problems = []
    for key in sorted(set().union(*states)):
        having = [rank for rank, state in enumerate(states) if key in state]
        if same_keys and len(having) < len(states):
            lacking = [rank for rank in range(len(states)) if rank not in having]
            problems.append(f"{key} is on {_ranks(having)} and not on {_ranks(lacking)}")
            continue
        first = states[having[0]][key]
        odd = [rank for rank in having if states[rank][key] != first]
        if odd:
            problems.append(
                f"{key} is {first} on rank {having[0]} and {states[odd[0]][key]} on {_ranks(odd)}"
            )
    return problems


def describe(value: Any) -> str:
    """Return all but the values of a tensor; the value of a number, a text, or a list of them."""
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        placed = f"{tuple(value.placements)} on a mesh {tuple(mesh.shape)} {mesh.mesh_dim_names}"
        return f"{value.dtype} {tuple(value.shape)} as {placed}"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(describe, value))}]"
    return type(value).__name__


def share_error(what: str, error: Exception | None, group: dist.ProcessGroup) -> None:
    """Raise on every rank if one of them has an ``error``: its own, or ValueError with the text."""
    text = None if error is None else f"{type(error).__name__}: {error}"
    for rank, found in enumerate(everyones(text, group)):
        if found is not None:
            raise error or ValueError(f"rank {rank} cannot {what}: {found}")


def everyones(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return what each rank of ``group`` passes, any object that can be pickled."""
    values: list[Any] = [None] * group.size()
    with waiting("exchange of what ranks found for a checkpoint", group=group, aside=beside()):
        dist.all_gather_object(values, value, group=group)
    return values


def beside() -> bool:
    """Tell whether this thread writes a checkpoint beside training."""
    return threading.current_thread() is not threading.main_thread()


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
