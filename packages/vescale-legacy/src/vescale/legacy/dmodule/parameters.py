# SPDX-License-Identifier: Apache-2.0
"""Turn the parameters and buffers of a module into DTensors."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.legacy._errors import LegacyValueError
from vescale.legacy.dmodule.placements_interface import PlacementsInterface
from vescale.legacy.dtensor.conversion import distribute_tensor, from_local
from vescale.legacy.dtensor.placement_types import Placement, Replicate

__all__ = ["distribute_parameters"]


def distribute_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, PlacementsInterface],
    *,
    is_model_sharded: bool,
) -> None:
    """Put a DTensor in the place of each parameter and buffer, ``Replicate`` without an entry.

    A parameter of several names stays one; ``ValueError``, before anything is changed, where
    its names have different placements.
    """
    whole = (Replicate(),) * mesh.ndim
    layouts: dict[int, tuple[str, tuple[Placement, ...]]] = {}
    for fqn, tensor, _, _ in _tensors(module):
        placements: Any = plan[fqn].placements if fqn in plan else whole
        first, others = layouts.setdefault(id(tensor), (fqn, placements))
        if others != placements:
            raise LegacyValueError(
                f"{first} and {fqn} are one parameter, and the plan puts it under {others} and "
                f"{placements}; give both the same placements."
            )
    made: dict[int, torch.Tensor] = {}
    for _, tensor, owner, name in list(_tensors(module)):
        if id(tensor) not in made:
            _, placements = layouts[id(tensor)]
            made[id(tensor)] = _made(tensor, mesh, placements, plan, is_model_sharded)
        owner[name] = made[id(tensor)]


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Any, str]]:
    for path, submodule in module.named_modules():
        for owner in (submodule._parameters, submodule._buffers):
            for name, tensor in owner.items():
                if tensor is not None:
                    yield (f"{path}.{name}" if path else name), tensor, owner, name


def _made(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    plan: Mapping[str, PlacementsInterface],
    is_model_sharded: bool,
) -> torch.Tensor:
    data = tensor.detach()
    if isinstance(data, DTensor) or not is_model_sharded:
        out = distribute_tensor(data, mesh, placements)
    else:
        out = from_local(data, mesh, placements, run_check=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(out, requires_grad=tensor.requires_grad)
    return out
