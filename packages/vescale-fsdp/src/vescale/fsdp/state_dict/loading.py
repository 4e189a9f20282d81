# SPDX-License-Identifier: Apache-2.0
"""Fill a model with a state, whole or sharded, once it is known on all ranks to fit."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from vescale.dtensor.state import match_full_state
from vescale.fsdp.agreement import agree
from vescale.fsdp.fqns import groups_in
from vescale.fsdp.materialize import materialize, meta_names
from vescale.fsdp.phases import waiting
from vescale.fsdp.state_dict.names import EXTRA_STATE, StateNames, Value
from vescale.fsdp.units import units_of


class LoadedKeys(NamedTuple):
    """What did not match, as ``nn.Module.load_state_dict`` returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_model(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    src: int | None,
    strict: bool,
    parts: bool = False,
    optional: Collection[str] = (),
) -> LoadedKeys:
    """Copy ``state_dict`` into ``model``'s parameters and buffers; see ``load_full_state_dict``.

    With ``src`` the state of that global rank counts, else that of each rank. With ``parts`` it may
    hold DTensors. Keys in ``optional`` may be missing. Without a process group this process is all.
    """
    prepare(model)
    device, names = device_of(model), None
    given, targets, error = {}, {}, None
    try:
        names = StateNames(model)
        names.check_loadable()
        targets = names.targets()
        if src is None or not dist.is_initialized() or dist.get_rank() == src:
            given = names.translate(state_dict)
    except Exception as caught:
        error = caught  # agree_on_load() raises it, here and on the other ranks
    agree_on_load(device, "\n".join(targets), error)
    state = match_full_state(
        targets,
        given,
        src=src,
        strict=strict,
        optional={*names.optional, *optional},
        allow_meta=True,
        parts=parts,
    )
    absent = {name for key in state.absent for name in names.tied_to(key)}
    lost = [name for name in meta_names(model) if names.clean(name) in absent]
    agree_on_load(device, "", _left_on_meta(lost) if lost else None)
    materialize(model, device)
    targets = StateNames(model).targets()
    with torch.no_grad(), waiting("broadcast of a full state"):
        state.copy_into(targets)
    set_extra_states(model, targets, absent)
    return LoadedKeys(state.missing, state.unexpected)


def prepare(model: nn.Module) -> None:
    """Put the sharded parameters in place: what is gathered would be out of date afterwards."""
    for unit in units_of(model, recurse=True):
        unit.reshard()


def set_extra_states(model: nn.Module, targets: dict[str, Any], absent: Collection[str]) -> None:
    """Hand what ``targets`` has from ``get_extra_state()`` back to the modules."""
    names = StateNames(model)
    for fqn, module in model.named_modules():
        key = names.clean(f"{fqn}.{EXTRA_STATE}" if fqn else EXTRA_STATE)
        if key in targets and key not in absent:
            value = targets[key]
            module.set_extra_state(value.value if isinstance(value, Value) else value)


def device_of(model: nn.Module) -> torch.device:
    """Return where tensors travel, and where plain ones on meta go."""
    for group in groups_in(model):
        return group.device
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
    nccl = dist.is_initialized() and "nccl" in dist.get_backend()
    return torch.device("cuda" if nccl else "cpu")


def agree_on_load(device: torch.device, description: str, error: Exception | None) -> None:
    """Raise on every rank what one of them found, or where their descriptions differ."""
    world = dist.group.WORLD
    agree([] if world is None else world, device, "load the full state", description, error)


def _left_on_meta(names: list[str]) -> ValueError:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ValueError(
        f"the state has no values for {', '.join(names[:10])}{more}, which are on the meta device; "
        "call vescale.fsdp.init_empty(model, device) first, or add them to the state (a buffer "
        "with persistent=False is no part of state_dict(), but is loaded if it is there)."
    )
