# SPDX-License-Identifier: Apache-2.0
"""``DistributedOptimizer``: each data parallel rank updates an equal part of every bucket."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.legacy._errors import LegacyValueError
from vescale.legacy._torch_compat import all_gather_single
from vescale.legacy.ddp import DistributedDataParallel
from vescale.legacy.ddp.grad_buffer import GradBuffer
from vescale.legacy.optim.clip_grads import clip_grad_norm_fp32
from vescale.legacy.optim.shards import Shard, fill_own, shards_of, write_back
from vescale.legacy.optim.utils import param_is_sharded_or_replicate_on_first_rank

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer:
    """Shard gradients and optimizer state of DDP models over their data parallel ranks (ZeRO-2).

    Each bucket is cut into equal ranges regardless of parameters; rank i owns range i of each.
    ``optimizer`` is an instance of an elementwise torch optimizer (Adam, AdamW, SGD), whose
    parameter groups are taken, or its class, built with ``optimizer_kwargs``. Parameters that are
    not fp32 have an fp32 copy of what this rank owns.

    ``clip_grad``: clip to this norm in each step, if above 0. ``overlap_param_gather``: gather the
    parameters while the program goes on, until the next forward of the model or
    ``finish_param_sync()``. ``grad_to_fp32``: the inner optimizer sees fp32 gradients. Other
    keywords are ignored.

    ``ValueError``: models that are no DDP, or without ``use_distributed_optimizer=True``; DTensor
    parameters on several meshes; an optimizer parameter that is in no buffer. ``RuntimeError``:
    models of several data parallel groups. There is no ``state_dict`` yet.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer],
        models: DistributedDataParallel | Sequence[DistributedDataParallel],
        clip_grad: float = 0.0,
        overlap_param_gather: bool = False,
        grad_to_fp32: bool = True,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.models = [models] if isinstance(models, nn.Module) else list(models)
        _check_models(self.models)
        self.clip_grad, self.grad_to_fp32 = clip_grad, grad_to_fp32
        self.overlap_param_gather = overlap_param_gather
        if isinstance(optimizer, type):
            if optimizer_kwargs is None:
                raise LegacyValueError(
                    f"optimizer={optimizer.__name__} is a class: give optimizer_kwargs, such as "
                    "{'lr': 1e-3}."
                )
            trained = [p for model in self.models for p in model.parameters() if p.requires_grad]
            optimizer = optimizer(trained, **optimizer_kwargs)
        self.optimizer = optimizer
        self._shards: dict[nn.Parameter, list[Shard]] = {}
        for buffer in self._buffers():
            for parameter in buffer.parameters:
                self._shards[parameter] = []
            for index in range(len(buffer.buckets)):
                for shard in shards_of(buffer, index):
                    self._shards[shard.parameter].append(shard)
        self._groups = self._take_over()
        self._gathering: dict[int, list[tuple[GradBuffer, int, torch.Tensor, Any]]] = {}
        if overlap_param_gather:
            for index, model in enumerate(self.models):
                hook = functools.partial(self._before_forward, index)
                model.register_forward_pre_hook(hook)

    def step(self, closure: Callable | None = None) -> torch.Tensor | None:
        """Update the parameters of all ranks; return the norm if gradients are clipped, else None.

        Finishes the gradient sync of the models, unless that was done. Gradients are gone
        afterwards: the buffers have served to gather the parameters. ``ValueError`` for a
        ``closure``: gradients are taken once a step.
        """
        if closure is not None:
            raise LegacyValueError("step takes no closure here; call backward before it.")
        self.finish_param_sync()
        for model in self.models:
            model.finish_grad_sync()
        self._copy_model_grads_to_main_grads()
        norm = None
        if self.clip_grad > 0.0:
            norm = torch.tensor(self.clip_grad_norm(self.clip_grad))
        self.optimizer.step()
        for shards in self._groups:
            for shard in shards:
                if shard.main.dtype != shard.parameter.dtype:
                    shard.model.copy_(shard.main)
                shard.main.grad = None
        self._gather_parameters()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and get the buffers of the models ready for the next backward."""
        self.optimizer.zero_grad(set_to_none)
        for model in self.models:
            for parameter in model.parameters():
                parameter.grad = None
            model.zero_grad_buffer()

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip the gradients to a norm over all ranks, each element counted once; return it."""
        ranks = self.models[0].data_parallel_ranks
        counted = [
            shard.main.grad
            for shards in self._groups
            for shard in shards
            if shard.main.grad is not None
            and param_is_sharded_or_replicate_on_first_rank(shard.parameter, ranks)
        ]
        return clip_grad_norm_fp32(self.get_parameters(), counted, clip_grad)

    def get_parameters(self) -> list[torch.Tensor]:
        """Return the flat parts that this rank updates."""
        return [shard.main for shards in self._groups for shard in shards]

    def finish_param_sync(self, model_index: int | None = None) -> None:
        """Wait for the parameters of one model, or of all, where gathering overlaps."""
        wanted = list(self._gathering) if model_index is None else [model_index]
        for index in wanted:
            for buffer, bucket, gathered, work in self._gathering.pop(index, ()):
                work.wait()
                write_back(buffer, bucket, gathered)

    def get_loss_scale(self) -> float:
        """Return 1.0: losses are not scaled."""
        return 1.0

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The state of the inner optimizer, by the parts of ``get_parameters()``."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the inner optimizer; the parameters are the parts of ``get_parameters()``."""
        return self.optimizer.param_groups

    def _copy_model_grads_to_main_grads(self) -> None:
        """Give each part the gradient that this rank owns."""
        for shards in self._groups:
            for shard in shards:
                dtype = torch.float32 if self.grad_to_fp32 else shard.main.dtype
                shard.main.grad = shard.grad.to(dtype).to(shard.main.dtype)

    def _before_forward(self, index: int, *_: Any) -> None:
        self.finish_param_sync(index)

    def _buffers(self) -> list[GradBuffer]:
        return [buffer for model in self.models for buffer in model.grad_buffers.values()]

    def _take_over(self) -> list[list[Shard]]:
        """Put our parts in the place of the parameters of the inner optimizer."""
        if self.optimizer.state:
            raise LegacyValueError(
                "the optimizer has taken steps already; wrap it before the first one."
            )
        groups = []
        for number, group in enumerate(self.optimizer.param_groups):
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            for parameter in trained:
                if parameter not in self._shards:
                    raise LegacyValueError(
                        f"param_groups[{number}] has a parameter of shape {tuple(parameter.shape)} "
                        "that is in no gradient buffer of the models; build the optimizer from the "
                        "parameters of the DDP models, after parallelize_module."
                    )
            groups.append([shard for parameter in trained for shard in self._shards[parameter]])
        for group, shards in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [shard.main for shard in shards]
        return groups

    def _gather_parameters(self) -> None:
        for number, model in enumerate(self.models):
            started = []
            for buffer in model.grad_buffers.values():
                for index, bucket in enumerate(buffer.buckets):
                    apart = self.overlap_param_gather  # zero_grad() may clear the buffer before
                    whole = torch.empty_like(bucket.data) if apart else bucket.data
                    own = fill_own(buffer, bucket, index, torch.empty_like(bucket.data[bucket.own]))
                    work = all_gather_single(whole, own, group=bucket.group, async_op=True)
                    started.append((buffer, index, whole, work))
            self._gathering[number] = started
        if not self.overlap_param_gather:
            self.finish_param_sync()


def _check_models(models: Sequence[Any]) -> None:
    if not models or not all(isinstance(model, DistributedDataParallel) for model in models):
        raise LegacyValueError(
            f"models={[type(model).__name__ for model in models]}: expected one or more "
            "DistributedDataParallel of vescale.legacy.ddp."
        )
    for model in models:
        if not model.use_distributed_optimizer:
            raise LegacyValueError(
                "DistributedOptimizer needs DistributedDataParallel(..., "
                "use_distributed_optimizer=True)."
            )
    if len({tuple(model.data_parallel_ranks) for model in models}) > 1:
        raise RuntimeError("the models have different data parallel groups; give them one.")
    meshes = {
        parameter.device_mesh
        for model in models
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
    }
    if len(meshes) > 1:
        raise LegacyValueError(f"parameters are on {len(meshes)} meshes, {meshes}; use one.")
