# SPDX-License-Identifier: Apache-2.0
"""Read one checkpoint into a model and its optimizers, once it is known on all ranks to fit."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from vescale.dtensor.matching import Path as Keys
from vescale.dtensor.matching import leaves, name_of
from vescale.fsdp.checkpoint.alike import everyones, share_error
from vescale.fsdp.checkpoint.rank_state import unpack
from vescale.fsdp.materialize import materialize, meta_names
from vescale.fsdp.phases import waiting
from vescale.fsdp.state_dict import get_model_state_dict
from vescale.fsdp.state_dict.loading import device_of, prepare, set_extra_states
from vescale.fsdp.state_dict.named_optimizers import GROUPS, STATE, NamedOptimizers, several
from vescale.fsdp.state_dict.names import StateNames

MODEL, OPTIMIZER, RANKS = "model", "optimizer", "ranks"
MOST_NAMES = 10


def read(
    path: Path,
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    group: dist.ProcessGroup,
    *,
    strict: bool,
) -> None:
    """Fill ``model`` and ``optimizers`` from the checkpoint at ``path``, in place.

    Raises ValueError on all ranks, before anything is changed, for keys, shapes and dtypes that do
    not fit, and RuntimeError for what cannot be read.
    """
    state: dict[str, Any] = {}
    named, left_on_meta, error = None, [], None
    try:
        if isinstance(model, nn.Module):  # anything else is refused below
            prepare(model)
        state[MODEL] = get_model_state_dict(model)
        if optimizers := several(optimizers):
            named = NamedOptimizers(model, optimizers)
        names = StateNames(model)
        names.check_loadable()
        left_on_meta = _left_on_meta(model, names)
    except Exception as caught:
        error = caught
    share_error("load", error, group)
    saved = _metadata(path, group)
    # On the meta device an optimizer's state cannot be made; what fits is seen before, for a model.
    _check(path, state, saved, group, strict, left_on_meta)
    materialize(model, device_of(model))
    state[MODEL] = get_model_state_dict(model)
    had_state = {fqn for fqn, values in named.held().items() if values} if named else set()
    if named:
        state[OPTIMIZER] = named.state(keep=True)
        others = {(fqn,) for fqn in named.all_fqns - named.own_fqns()}
        _check(path, state, saved, group, strict, others=others)
    absent = _take_out(state, saved)
    try:
        with waiting("read of a checkpoint", group=group):
            dcp.load(state, checkpoint_id=path, process_group=group)
    except CheckpointException as failed:
        rank, (reason, *_) = next(iter(failed.failures.items()))
        raise RuntimeError(
            f"{path} cannot be read, rank {rank} says: {reason!r}. Tensors may have been "
            "overwritten: load another checkpoint before going on."
        ) from failed
    try:
        set_extra_states(model, state[MODEL], absent)
    except Exception as caught:
        error = caught
    share_error("load", error, group)
    if named:
        states = state[OPTIMIZER][STATE]
        found = {keys[2] for keys in saved if keys[:2] == (OPTIMIZER, STATE)}
        state[OPTIMIZER][STATE] = {
            fqn: values for fqn, values in states.items() if fqn in found or fqn in had_state
        }
        named.load({GROUPS: [], **state[OPTIMIZER]})


def read_rank_state(path: Path, name: str, group: dist.ProcessGroup) -> Any:
    """Return what this rank saved under ``name``, None where there was no such rank."""
    saved, key = _metadata(path, group), (RANKS, name, str(group.rank()))
    mine: dict[str, Any] = {}
    if key in saved:
        mine[str(group.rank())] = torch.empty(saved[key].size, dtype=torch.uint8)
    dcp.load({RANKS: {name: mine}}, checkpoint_id=path, process_group=group)
    return unpack(*mine.values()) if mine else None


def _metadata(path: Path, group: dist.ProcessGroup) -> dict[Keys, Any]:
    """Return what the checkpoint has, by path; raises ValueError where it cannot be read."""
    found, problem = {}, None
    try:
        found = by_path(dcp.FileSystemReader(path).read_metadata())
    except Exception as error:  # of unpickling, which may raise anything
        problem = f"{type(error).__name__}: {error}"
    problems = [(r, text) for r, text in enumerate(everyones(problem, group)) if text]
    if problems:
        rank, text = problems[0]
        raise ValueError(f"{path} is no checkpoint that rank {rank} can read ({text}).")
    return found


def by_path(metadata: Metadata) -> dict[Keys, Any]:
    """Return what ``metadata`` says of each entry, by the entry's path in the state."""
    paths = metadata.planner_data or {}
    return {
        tuple(paths.get(key, tuple(key.split(".")))): value
        for key, value in metadata.state_dict_metadata.items()
    }


def _left_on_meta(model: nn.Module, names: StateNames) -> list[str]:
    """Return the tensors on meta that no checkpoint has, for they are not saved."""
    return [name for name in map(names.clean, meta_names(model)) if name in names.optional]


def _check(
    path: Path,
    state: dict[str, Any],
    saved: dict[Keys, Any],
    group: dist.ProcessGroup,
    strict: bool,
    left_on_meta: Iterable[str] = (),
    others: Collection[Keys] = (),
) -> None:
    """Raise ValueError on all ranks where what was ``saved`` does not fit ``state``.

    Optimizer states of parameters in ``others``, which other optimizers have, may be there.
    """
    wanted = {keys: value for keys, value in leaves(state) if not _is_option(keys)}
    sections = {keys[0] for keys in wanted}
    here = {keys: value for keys, value in saved.items() if keys[0] in sections}
    problems = [*_misfits(wanted, here)]
    lost = [*left_on_meta]
    if strict:
        missing = sorted(name_of(keys) for keys in wanted if keys not in here)
        unexpected = sorted(
            name_of(keys)
            for keys in here
            if keys not in wanted and not _is_option(keys) and keys[2:3] not in others
        )
        if missing or unexpected:
            problems.insert(
                0,
                f"it lacks {_some(missing)}, and nothing wants its {_some(unexpected)}; "
                "strict=False loads what fits",
            )
    else:
        lost += [
            name_of(keys[1:])
            for keys, x in wanted.items()
            if keys not in here and isinstance(x, torch.Tensor) and x.is_meta
        ]
    if lost:
        problems.append(
            f"it has no values for {_some(lost)} on the meta device; call vescale.fsdp.init_empty("
            "model, device) first"
        )
    for rank, text in enumerate(everyones("; ".join(problems[:MOST_NAMES]), group)):
        if text:
            raise ValueError(f"{path} does not fit on rank {rank}: {text}.")


def _misfits(wanted: dict[Keys, Any], here: dict[Keys, Any]) -> Iterable[str]:
    for keys, x in wanted.items():
        if keys not in here:
            continue
        found, name = here[keys], name_of(keys)
        is_tensor = isinstance(found, TensorStorageMetadata)
        if is_tensor != isinstance(x, torch.Tensor):
            yield f"{name} is a tensor on one side only"
        elif is_tensor and found.size != x.shape:
            yield f"{name} has shape {tuple(found.size)} and not {tuple(x.shape)}"
        elif is_tensor and not torch.can_cast(found.properties.dtype, x.dtype):
            yield f"{name} is {found.properties.dtype}, which does not become {x.dtype}"


def _take_out(state: dict[str, Any], saved: dict[Keys, Any]) -> set[str]:
    """Remove from ``state`` what the checkpoint does not have; return those of the model."""
    absent = set()
    for keys, _ in [*leaves(state)]:
        if keys in saved or _is_option(keys):
            continue
        place: Any = state
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]
        if keys[0] == MODEL:
            absent.add(name_of(keys[1:]))
    if OPTIMIZER in state and not any(keys[:2] == (OPTIMIZER, GROUPS) for keys in saved):
        del state[OPTIMIZER][GROUPS]
    return absent


def _is_option(keys: Keys) -> bool:
    """Tell whether a path leads into param_groups, which are matched by names of parameters."""
    return keys[:2] == (OPTIMIZER, GROUPS)


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return f"{names[:MOST_NAMES]}" + (f" and {more} more" if more > 0 else "")
