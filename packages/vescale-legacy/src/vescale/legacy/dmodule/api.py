# SPDX-License-Identifier: Apache-2.0
"""``parallelize_module``: a module written for one device, made parallel by a plan."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.legacy._errors import LegacyValueError
from vescale.legacy.dmodule._dmodule import DModule, DModuleState, bind_methods
from vescale.legacy.dmodule.forward import install_contexts, install_factory, install_plan
from vescale.legacy.dmodule.parameters import distribute_parameters
from vescale.legacy.dmodule.plan import check_plan, resolve_forward, resolve_parameters
from vescale.legacy.dtensor.normalize import mesh_or_current
from vescale.legacy.model.patch import get_all_model_patch

__all__ = ["is_dmodule", "parallelize_module"]

DEVICE_TYPES = ("cpu", "cuda", "meta")


def is_dmodule(module: nn.Module) -> bool:
    """Tell whether ``module`` is what ``parallelize_module`` returned."""
    return DModule.is_dmodule(module)


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    sharding_plan: Mapping[str, Any] | None = None,
    *,
    is_model_sharded: bool = False,
    factory: bool | Mapping[type[nn.Module], Any] = False,
) -> nn.Module:
    """Make ``module`` a DModule, in place, and return it. Collective.

    ``sharding_plan`` is ``{"parameter": {pattern: placements}, "forward": {pattern: plan}}``: a
    pattern is a regular expression that matches the whole name of a submodule, then a dot and a
    parameter's name, ``input`` or ``output``. Parameters without an entry are replicated, from the
    first rank of the mesh; with ``is_model_sharded`` they are this rank's parts already.
    ``factory`` lets ``torch.zeros`` and its like return DTensors inside forward: everywhere
    (True), or in modules of a class (``{Class: True, False or {torch.zeros: placements}}``).

    Inside forward an operation that would communicate to reshard its inputs raises
    ``RuntimeError``, unless ``VESCALE_DISABLE_REDISTRIBUTE=0``.

    A DModule is returned as it is, with a ``UserWarning``. ``KeyError``: an unknown part of the
    plan. ``ValueError``: another device type, or one parameter with two placements.
    """
    if is_dmodule(module):
        warnings.warn("this module is a DModule already; returned as it is.", stacklevel=2)
        return module
    mesh = mesh_or_current(device_mesh)
    if mesh.device_type not in DEVICE_TYPES:
        raise LegacyValueError(f"{mesh}: expected a device type of {list(DEVICE_TYPES)}.")
    parameter_patterns, forward_patterns = check_plan(sharding_plan)
    parameter_plan = resolve_parameters(module, parameter_patterns, mesh.ndim)
    forward_plan = resolve_forward(module, forward_patterns, mesh.ndim)
    distribute_parameters(module, mesh, parameter_plan, is_model_sharded=is_model_sharded)
    for patch in get_all_model_patch():
        patch(module, forward_plan, mesh)
    install_plan(module, forward_plan, mesh)
    install_factory(module, factory, mesh)
    install_contexts(module)
    bind_methods(module, DModuleState(mesh, parameter_plan, forward_plan))
    return module
