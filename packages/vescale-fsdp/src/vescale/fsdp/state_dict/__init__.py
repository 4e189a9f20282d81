# SPDX-License-Identifier: Apache-2.0
"""States of models and optimizers by name, sharded or whole: what
``torch.distributed.checkpoint.state_dict`` does for FSDP2, for ragged parameters too.

Change the import, and scripts of FSDP2 stay as they are. Works on models that are wrapped by this
package, by FSDP2, by DDP or not at all, under ``torch.compile`` and activation checkpointing, whose
names do not appear in keys.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from vescale.dtensor.state import full_state_dict
from vescale.fsdp.fqns import sharded_parameters
from vescale.fsdp.inference import ordinary_tensors
from vescale.fsdp.phases import waiting
from vescale.fsdp.state_dict.flat import flatten
from vescale.fsdp.state_dict.loading import LoadedKeys, load_model
from vescale.fsdp.state_dict.named_optimizers import NamedOptimizers, several
from vescale.fsdp.state_dict.names import StateNames
from vescale.fsdp.state_dict.optimizer_loading import load_optimizers

__all__ = [
    "LoadedKeys",
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]


@ordinary_tensors
def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return parameters and persistent buffers by name, detached: the model's own memory.

    - By default tensors are sharded as they are, without communication: hand the dict to
      ``torch.distributed.checkpoint``. Loading into it loads into the model.
    - ``full_state_dict=True``: whole tensors, collective, every rank has all of them.
    - ``full_state_dict=True, cpu_offload=True``: whole tensors on the CPU of rank 0, ``{}`` on the
      others; no device holds more than one whole tensor beside its shards.
    - ``cpu_offload=True`` alone: sharded tensors on the CPU.
    - ``ignore_frozen_params=True``: without parameters that are not trained.

    A tied parameter has all its names, and is one tensor under them. Raises
    NotImplementedError for ``submodules``.
    """
    options = _checked(model, options, submodules)
    names, params = StateNames(model), sharded_parameters(model)
    frozen = {
        name
        for fqn, param in params.items()
        if not param.requires_grad
        for name in names.tied_to(names.clean(fqn))
    }
    detached: dict[int, torch.Tensor] = {}
    state = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = names.clean(key)
        if options.ignore_frozen_params and name in frozen:
            continue
        if isinstance(value, torch.Tensor):
            value = detached.setdefault(id(value), value.detach())
        state[name] = value
    return _handed_out(state, options)


@ordinary_tensors
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the states of ``optimizers`` by the names of ``model``'s parameters, in one dict.

    ``{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, ...], ...}]}``, or with
    ``flatten_optimizer_state_dict=True`` one level of keys. Options are those of
    ``get_model_state_dict``. A parameter that has no state yet has that of step 0 in the dict, so
    that a checkpoint can be loaded into it; the optimizer itself stays without, and goes on as it
    would have (torch's helper leaves it one step ahead).

    Collective where the optimizer's step is. Raises ValueError for a parameter of an optimizer that
    is none of ``model``'s.
    """
    options = _checked(model, options, submodules)
    state = NamedOptimizers(model, optimizers).state()
    if options.flatten_optimizer_state_dict:
        state = flatten(state)
    return _handed_out(state, options)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``get_model_state_dict`` and ``get_optimizer_state_dict`` of the same arguments."""
    optimizers = several(optimizers)
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


@ordinary_tensors
def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any] | None,
    *,
    options: StateDictOptions | None = None,
) -> LoadedKeys:
    """Copy a state into parameters and buffers, in place; return missing and unexpected keys.

    - By default every rank passes a state, of DTensors in any placement (redistributed where it is
      another) or whole tensors.
    - ``full_state_dict=True``: every rank passes whole tensors, and none travels.
    - ``full_state_dict=True, broadcast_from_rank0=True``: rank 0 passes whole tensors, which travel
      one at a time; a rank needs memory for the largest beside its shards.
    - ``strict=False``: keys may be missing or unknown.
    - ``ignore_frozen_params=True``: those of parameters that are not trained may be missing.

    Names, ties, dtypes, buffers, meta tensors and errors are those of
    ``vescale.fsdp.load_full_state_dict``. Collective over the default process group, if any.
    """
    options = _checked(model, options)
    optional = set()
    if options.ignore_frozen_params:
        names = StateNames(model)
        frozen = (f for f, p in sharded_parameters(model).items() if not p.requires_grad)
        optional = {names.clean(fqn) for fqn in frozen}
    return load_model(
        model,
        model_state_dict,
        src=0 if options.broadcast_from_rank0 else None,
        strict=options.strict,
        parts=not options.full_state_dict,
        optional=optional,
    )


@ordinary_tensors
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any] | None,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Copy a state, flat or nested, into ``optimizers``; cut as they cut theirs.

    Options are those of ``set_model_state_dict``. What belongs to parameters of ``model`` that are
    in none of ``optimizers`` is passed over, so that several can be set one by one. With
    ``strict=False`` a parameter that the state does not have keeps what it has. Learning rates and
    other options of groups are found by the names of the parameters.

    Raises ValueError on all ranks alike, before anything is changed, naming keys that are missing
    or that nothing wants, shapes that differ, and options with two values for one group.
    """
    options = _checked(model, options)
    load_optimizers(
        model,
        optimizers,
        optim_state_dict,
        src=0 if options.broadcast_from_rank0 else None,
        strict=options.strict,
        parts=not options.full_state_dict,
    )


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    model_state_dict: Mapping[str, Any] | None,
    optim_state_dict: Mapping[str, Any] | None,
    options: StateDictOptions | None = None,
) -> LoadedKeys:
    """Call ``set_model_state_dict`` and ``set_optimizer_state_dict``."""
    optimizers = several(optimizers)
    result = set_model_state_dict(model, model_state_dict, options=options)
    if optimizers:
        set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return result


def _checked(
    model: nn.Module, options: StateDictOptions | None, submodules: set[nn.Module] | None = None
) -> StateDictOptions:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module.")
    if submodules:
        raise NotImplementedError(
            "submodules=... is deprecated in torch and not here; pick the keys you want from the "
            "dict that is returned."
        )
    options = options or StateDictOptions()
    if not isinstance(options, StateDictOptions):
        raise TypeError(f"options is a {type(options).__name__}, expected StateDictOptions.")
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError(
            "broadcast_from_rank0=True needs full_state_dict=True: rank 0 passes whole tensors."
        )
    return options


def _handed_out(state: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    if options.full_state_dict:
        rank0_only = options.cpu_offload and dist.is_initialized()
        with waiting("gather of a full state"):
            return full_state_dict(state, rank0_only=rank0_only, cpu_offload=options.cpu_offload)
    return _on_cpu(state) if options.cpu_offload else state


def _on_cpu(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_on_cpu(value) for value in state]
    return state.cpu() if isinstance(state, torch.Tensor) else state
