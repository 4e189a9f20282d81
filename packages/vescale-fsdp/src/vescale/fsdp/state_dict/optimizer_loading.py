# SPDX-License-Identifier: Apache-2.0
"""Fill the optimizers of a model with a state, whole or sharded, once all ranks know it fits."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from vescale.dtensor.state import match_full_state
from vescale.fsdp.phases import waiting
from vescale.fsdp.state_dict.flat import is_flat, unflatten
from vescale.fsdp.state_dict.loading import agree_on_load, device_of, prepare
from vescale.fsdp.state_dict.named_optimizers import GROUPS, PARAMS, STATE, NamedOptimizers


def load_optimizers(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    state_dict: Mapping[str, Any] | None,
    *,
    src: int | None,
    strict: bool,
    parts: bool = False,
) -> None:
    """Copy ``state_dict`` into the optimizers; see ``set_optimizer_state_dict``.

    With ``src`` the state of that global rank counts, else that of each rank. With ``parts`` it may
    hold DTensors.
    """
    prepare(model)
    device, named, error = device_of(model), None, None
    given: dict[str, Any] = {STATE: {}, GROUPS: []}
    src = src if dist.is_initialized() else None
    try:
        named = NamedOptimizers(model, optimizers)
        if src is None or dist.get_rank() == src:
            given = _translate(named, state_dict)
            _check_groups(named, given[GROUPS], strict)
    except Exception as caught:
        error = caught
    agree_on_load(device, "", error)
    header = [given[GROUPS]]
    if src is not None:
        with waiting("broadcast of an optimizer's options"):
            dist.broadcast_object_list(header, src=src)
    _check_options(named, header[0], device)
    targets = named.state()
    before = {fqn: values for fqn, values in named.held().items() if values}
    state = match_full_state(targets[STATE], given[STATE], src=src, strict=strict, parts=parts)
    with torch.no_grad(), waiting("broadcast of a full state"):
        state.copy_into(targets[STATE])
    filled = {path[0] for path in state.described}
    kept = {fqn: v for fqn, v in targets[STATE].items() if fqn in filled or fqn in before}
    named.load({STATE: kept, GROUPS: header[0]})


def _translate(named: NamedOptimizers, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the caller's state, nested, by the names that ``named`` uses."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"the optimizer state is a {type(state_dict).__name__}, expected the dict that "
            "get_optimizer_state_dict returns; where rank 0 broadcasts it must have it."
        )
    names = named.names
    if is_flat(state_dict):
        cleaned = {_clean_flat(key, named): value for key, value in state_dict.items()}
        state_dict = unflatten(cleaned, {n for fqn in named.all_fqns for n in names.tied_to(fqn)})
    elif any(isinstance(key, int) for key in state_dict[STATE]):
        raise ValueError(
            "the optimizer state has numbers for parameters, as optimizer.state_dict() gives them; "
            "pass it to optimizer.load_state_dict(), or save get_optimizer_state_dict()."
        )
    others = named.all_fqns - named.own_fqns()
    state = {}
    for key, values in state_dict[STATE].items():
        fqn = names.first(names.clean(key))
        if fqn not in others:
            state[fqn] = {name: value for name, value in values.items() if value is not None}
    groups = [
        {**group, PARAMS: [names.first(names.clean(key)) for key in group[PARAMS]]}
        for group in state_dict[GROUPS]
    ]
    return {STATE: state, GROUPS: groups}


def _clean_flat(key: str, named: NamedOptimizers) -> str:
    section, _, rest = key.partition(".")
    return f"{section}.{named.names.clean(rest)}"


def _check_groups(named: NamedOptimizers, groups: list[dict[str, Any]], strict: bool) -> None:
    saved = {fqn for group in groups for fqn in group[PARAMS]}
    missing = sorted(named.trainable() - saved)
    if strict and missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise ValueError(
            f"the state's param_groups do not have {missing[:10]}{more}; load with strict=False to "
            "keep the options that these parameters have."
        )


def _check_options(
    named: NamedOptimizers, groups: list[dict[str, Any]], device: torch.device
) -> None:
    """Raise on all ranks where saved options contradict each other, before anything changes."""
    error = None
    try:
        named.check(groups)
    except Exception as caught:
        error = caught
    agree_on_load(device, "", error)
