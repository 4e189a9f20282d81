# SPDX-License-Identifier: Apache-2.0
"""What runs around the forward of a DModule and of the modules that its plan names."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.legacy.dmodule._factory import (
    FactoryDispatchModeOff,
    FactoryDispatchModeOn,
    _provide_args,
    replicated,
)
from vescale.legacy.dmodule.placements_interface import PlacementsInterface
from vescale.legacy.dmodule.placing import deferring, place_input, place_output
from vescale.legacy.dtensor._diff import DeferReshardMode
from vescale.legacy.dtensor.implicit import no_implicit_resharding
from vescale.legacy.dtensor.interleaved import InterleavedOps
from vescale.legacy.dtensor.redistribution import redistribute_dtensor

__all__ = ["install_contexts", "install_factory", "install_plan"]


def install_plan(root: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Register hooks that place the inputs, outputs and parameters that the plan names."""
    modules = dict(root.named_modules())
    for fqn, entry in plan.items():
        path, _, name = fqn.rpartition(".")
        module = modules[path]
        if entry is None:
            continue
        if name == "input":
            signature = inspect.signature(module.forward)
            hook = functools.partial(_before, entry, signature, mesh, fqn)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        elif name == "output":
            module.register_forward_hook(functools.partial(_after, entry, mesh, fqn))
        else:
            _use_parameter_as(module, name, entry)


def install_contexts(root: nn.Module) -> None:
    """Refuse implicit resharding inside the forward of ``root``, and let results be deferred."""
    root.forward = _Around(root.forward, _root_contexts)


def install_factory(root: nn.Module, factory: Any, mesh: DeviceMesh) -> None:
    """Let constructors return DTensors in the modules that ``factory`` says."""
    if factory is False:
        return
    if factory is True:
        factory = {type(root): True}
    for module in root.modules():
        if type(module) not in factory:
            continue
        wanted = factory[type(module)]
        if wanted is False:
            context: Callable = FactoryDispatchModeOff
        else:
            table = replicated(mesh) if wanted is True else _provide_args(mesh, wanted)
            context = functools.partial(FactoryDispatchModeOn, mesh, table)
        module.forward = _Around(module.forward, context)


class _Around:
    """A forward that runs inside a context, made anew for each call."""

    def __init__(self, inner: Any, context: Any) -> None:
        functools.update_wrapper(self, inner, assigned=("__doc__",), updated=())
        self.inner, self.context = inner, context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context() as entered:
            out = self.inner(*args, **kwargs)
            return entered.resolve(out) if isinstance(entered, DeferReshardMode) else out


@contextmanager
def _root_contexts() -> Iterator[DeferReshardMode]:
    with ExitStack() as stack:
        stack.enter_context(no_implicit_resharding())
        stack.enter_context(InterleavedOps())
        mode = stack.enter_context(DeferReshardMode())
        token = deferring.set(mode)
        try:
            yield mode
        finally:
            deferring.reset(token)


def _before(
    entry: Any,
    signature: inspect.Signature,
    mesh: DeviceMesh,
    where: str,
    module: nn.Module,
    args: tuple,
    kwargs: dict,
) -> tuple[tuple, dict]:
    with FactoryDispatchModeOff():
        return place_input(entry, signature, args, kwargs, mesh, where)


def _after(
    entry: Any, mesh: DeviceMesh, where: str, module: nn.Module, args: tuple, out: Any
) -> Any:
    with FactoryDispatchModeOff():
        return place_output(entry, out, mesh, where)


def _use_parameter_as(module: nn.Module, name: str, entry: PlacementsInterface) -> None:
    if entry.placements is None:
        return
    module.forward = _Around(module.forward, functools.partial(_parameter_as, module, name, entry))


@contextmanager
def _parameter_as(module: nn.Module, name: str, entry: PlacementsInterface) -> Iterator[None]:
    parameter = module._parameters.pop(name)
    try:
        with FactoryDispatchModeOff():
            # An attribute of the module for the time of its forward.
            module.__dict__[name] = _Used.apply(parameter, entry)
        yield
    finally:
        module.__dict__.pop(name, None)
        module._parameters[name] = parameter


class _Used(torch.autograd.Function):
    """A parameter in another layout; its gradient in its own, or that of ``entry.grad``."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, entry: PlacementsInterface) -> torch.Tensor:
        ctx.placements = entry.grad or parameter.placements
        out = redistribute_dtensor(
            parameter.detach(), parameter.device_mesh, entry.placements, entry.async_op
        )
        return out.view_as(out) if out.placements == parameter.placements else out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor, None]:
        return redistribute_dtensor(grad, grad.device_mesh, ctx.placements), None
