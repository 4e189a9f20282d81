# SPDX-License-Identifier: Apache-2.0
"""``BasicOptimizer``: any torch optimizer on DDP and DModule models."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.legacy._errors import LegacyValueError
from vescale.legacy.ddp import DistributedDataParallel
from vescale.legacy.dmodule import is_dmodule

__all__ = ["BasicOptimizer", "BasicOptimizerHook", "GradOptimizerHookBase"]


class GradOptimizerHookBase(ABC):
    """What runs before and after a step of the inner optimizer; called with its hook arguments."""

    @staticmethod
    @abstractmethod
    def step_pre_hook(optim: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Run before the step."""

    @staticmethod
    @abstractmethod
    def step_post_hook(optim: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Run after the step."""


class BasicOptimizerHook(GradOptimizerHookBase):
    """Gives parameters without a ``grad`` that of their ``main_grad``, in their own dtype."""

    @staticmethod
    def step_pre_hook(optim: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        for group in optim.param_groups:
            for parameter in group["params"]:
                main_grad = getattr(parameter, "main_grad", None)
                if parameter.grad is None and main_grad is not None:
                    parameter.grad = _like(parameter, main_grad.to(parameter.dtype))

    @staticmethod
    def step_post_hook(optim: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        return None


class BasicOptimizer:
    """Run a torch optimizer on models whose gradients DDP or a DModule reduces.

    ``models``: a module or a list. ``grad_hook``: registered as step hooks of ``optimizer``; None
    for none, and the abstract base is taken as ``BasicOptimizerHook``. ``ValueError`` for a DDP
    with ``use_distributed_optimizer=True``: its ranks have a part of the gradients each.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: nn.Module | Sequence[nn.Module],
        grad_hook: type[GradOptimizerHookBase] | None = BasicOptimizerHook,
    ) -> None:
        self.optimizer = optimizer
        self.models = [models] if isinstance(models, nn.Module) else list(models)
        for model in ddp_models(self.models):
            if model.use_distributed_optimizer:
                raise LegacyValueError(
                    "BasicOptimizer needs whole gradients; wrap the model with "
                    "use_distributed_optimizer=False, or use DistributedOptimizer."
                )
        if grad_hook is not None:
            self.register_optimizer_hook(grad_hook)

    def register_optimizer_hook(self, grad_hook: type[GradOptimizerHookBase]) -> None:
        """Run the hooks of ``grad_hook`` around each step from now on."""
        if grad_hook is GradOptimizerHookBase:
            grad_hook = BasicOptimizerHook
        self.optimizer.register_step_pre_hook(grad_hook.step_pre_hook)
        self.optimizer.register_step_post_hook(grad_hook.step_post_hook)

    def step(self, closure: Callable | None = None) -> Any:
        """Reduce the partial gradients of DModules, and step. DDP has reduced its own."""
        module: Any
        for module in dmodules(self.models):
            module.start_grad_sync()
            module.finish_grad_sync()
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and get the buffers of DDP models ready for the next backward."""
        self.optimizer.zero_grad(set_to_none)
        for model in ddp_models(self.models):
            model.zero_grad_buffer()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the inner optimizer."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return that of the inner optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load it into the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)  # type: ignore[arg-type]  # any mapping does

    def get_loss_scale(self) -> float:
        """Return 1.0: losses are not scaled."""
        return 1.0


def ddp_models(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Return those of ``models`` that are wrapped for data parallelism."""
    return [model for model in models if isinstance(model, DistributedDataParallel)]


def dmodules(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the DModules in ``models``."""
    return [module for model in models for module in model.modules() if is_dmodule(module)]


def _like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
