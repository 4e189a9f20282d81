# SPDX-License-Identifier: Apache-2.0
"""What a DModule is: a module with a mesh, a resolved plan and the methods of this file."""

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.legacy.dmodule.grad_sync import GradSync, partial_gradients
from vescale.legacy.dmodule.placements_interface import PlacementsInterface
from vescale.legacy.dtensor.conversion import distribute_tensor
from vescale.legacy.dtensor.placement_types import short_name
from vescale.legacy.dtensor.redistribution import redistribute_dtensor

__all__ = ["DModule", "DModuleState", "bind_methods", "state_of"]

STATE = "_vescale_dmodule"


@dataclass
class DModuleState:
    """What ``parallelize_module`` found out, kept on the root module."""

    mesh: DeviceMesh
    parameter_plan: dict[str, PlacementsInterface]
    forward_plan: dict[str, Any]
    grad_sync: GradSync = field(default_factory=GradSync)


class DModule:
    """The name of what ``parallelize_module`` makes of a module, whose class stays as it is."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "DModule":
        raise RuntimeError("a DModule is not created; call parallelize_module on a module.")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise RuntimeError("DModule is no base class; call parallelize_module on a module.")

    @staticmethod
    def is_dmodule(module: nn.Module) -> bool:
        """Tell whether ``module`` is the root of what was parallelized."""
        return STATE in module.__dict__


def state_of(module: nn.Module) -> DModuleState:
    """Return the state of a DModule."""
    return module.__dict__[STATE]


def bind_methods(module: nn.Module, state: DModuleState) -> None:
    """Make ``module`` a DModule: the state and the methods below become its attributes."""
    module.__dict__[STATE] = state
    for method in (
        get_fwd_plan,
        list_grad_sync,
        start_grad_sync,
        finish_grad_sync,
        repr_params,
        dump_mesh_plans,
        load_state_dict,
    ):
        module.__dict__[method.__name__] = types.MethodType(method, module)


def get_fwd_plan(self: nn.Module, path: str) -> Any:
    """Return the forward plan's entry for a name such as ``fc1.output``, or None."""
    return state_of(self).forward_plan.get(path)


def list_grad_sync(self: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, gradient) of the parameters whose gradient is partial."""
    return [(name, parameter.grad) for name, parameter in partial_gradients(self)]


def start_grad_sync(self: nn.Module) -> None:
    """Start reducing partial gradients; see ``grad_sync.GradSync``."""
    state_of(self).grad_sync.start([parameter for _, parameter in partial_gradients(self)])


def finish_grad_sync(self: nn.Module) -> None:
    """Wait for them; after it no gradient is partial. Does nothing when none was started."""
    state_of(self).grad_sync.finish()


def repr_params(
    self: nn.Module,
    show_shape: bool = True,
    show_type: bool = True,
    show_shard: bool = True,
    show_mesh: bool = True,
    show_ltensor_shape: bool = True,
    show_layer: bool = True,
) -> str:
    """Return a table of the parameters, one a line."""
    rows = []
    for name, parameter in self.named_parameters():
        row = [name if show_layer else name.rpartition(".")[2]]
        if show_shape:
            row.append(str(tuple(parameter.shape)))
        if show_type:
            row.append(str(parameter.dtype).removeprefix("torch."))
        if isinstance(parameter, DTensor):
            if show_shard:
                row.append(" ".join(short_name(placement) for placement in parameter.placements))
            if show_mesh:
                row.append(f"mesh {tuple(parameter.device_mesh.shape)}")
            if show_ltensor_shape:
                row.append(f"local {tuple(parameter.to_local().shape)}")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def dump_mesh_plans(
    self: nn.Module, is_print: bool = True, msg: str = ""
) -> tuple[DeviceMesh, dict[str, PlacementsInterface], dict[str, Any]]:
    """Return (mesh, parameter plan, forward plan) by full names; print them with ``is_print``."""
    state = state_of(self)
    if is_print:
        print(msg, state.mesh, state.parameter_plan, state.forward_plan, sep="\n")
    return state.mesh, state.parameter_plan, state.forward_plan


def load_state_dict(
    self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """Load plain or DTensor values, bringing each to where the module has it. Collective.

    Plain values are whole tensors; the first rank's count. ``NotImplementedError``:
    ``assign=True``.
    """
    if assign:
        raise NotImplementedError("assign=True would put plain tensors in the place of DTensors.")
    current = dict(self.named_parameters()) | dict(self.named_buffers())
    placed = {key: _placed(value, current.get(key)) for key, value in state_dict.items()}
    return type(self).load_state_dict(self, placed, strict=strict)


def _placed(value: Any, like: torch.Tensor | None) -> Any:
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor):
        return value
    mesh, value = like.device_mesh, value.detach()
    if not isinstance(value, DTensor):
        return (
            distribute_tensor(value, mesh, like.placements) if value.shape == like.shape else value
        )
    if value.device_mesh != mesh:  # another device type, or another mesh object
        value = DTensor.from_local(
            value.to_local().to(mesh.device_type),
            mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return redistribute_dtensor(value, mesh, like.placements)
