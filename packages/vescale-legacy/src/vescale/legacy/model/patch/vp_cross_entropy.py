# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of logits whose classes are cut: three small all-reduces, no gather."""

import types
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.legacy.dtensor._utils import compute_local_offset
from vescale.legacy.dtensor.placement_types import Replicate

__all__ = ["VocabParallelCrossEntropy", "patch_vocab_parallel_cross_entropy"]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses [N] of this rank's logits [N, C / ranks], whose first class is ``first``."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        first: int,
        group: dist.ProcessGroup,
        ignored: int,
    ) -> torch.Tensor:
        highest = logits.new_full((logits.size(0),), -torch.inf)
        if logits.size(1):
            highest = logits.amax(1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted = logits - highest.unsqueeze(1)
        exp = shifted.exp()
        total = exp.sum(1)
        dist.all_reduce(total, group=group)
        used = target != ignored
        here = used & (target >= first) & (target < first + logits.size(1))
        place = (target - first).masked_fill(~here, 0).unsqueeze(1)
        mine = torch.zeros_like(total)
        if logits.size(1):
            mine = shifted.gather(1, place).squeeze(1).masked_fill(~here, 0.0)
        dist.all_reduce(mine, group=group)
        ctx.save_for_backward(exp / total.unsqueeze(1), place, here, used)
        return (total.log() - mine).masked_fill(~used, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        softmax, place, here, used = ctx.saved_tensors
        out = softmax.clone()
        if out.size(1):
            out.scatter_add_(1, place, -here.unsqueeze(1).to(out.dtype))
        return out * grad.masked_fill(~used, 0.0).unsqueeze(1), None, None, None, None


class VocabParallelCrossEntropy:
    """The forward of ``nn.CrossEntropyLoss`` for logits [N, C] under S(1) on a 1-D mesh."""

    @staticmethod
    def forward(module: nn.CrossEntropyLoss, input: DTensor, target: torch.Tensor) -> DTensor:
        """Return the loss, replicated; the gradient of ``input`` stays under S(1)."""
        mesh = input.device_mesh
        if isinstance(target, DTensor):
            target = target.full_tensor()
        first = compute_local_offset(input.shape, mesh, input.placements)[1]
        losses = _VocabParallelCrossEntropy.apply(
            input.to_local(), target, first, mesh.get_group(0), module.ignore_index
        )
        if module.reduction == "mean":
            losses = losses.sum() / (target != module.ignore_index).sum()
        elif module.reduction == "sum":
            losses = losses.sum()
        return DTensor.from_local(losses, mesh, [Replicate()], run_check=False)


def patch_vocab_parallel_cross_entropy(
    root: nn.Module, forward_plan: Mapping[str, Any], mesh: DeviceMesh
) -> None:
    """Patch ``nn.CrossEntropyLoss`` modules; what their input is decides at each call.

    Modules with ``weight``, ``label_smoothing`` or ``ignore_index`` are left, with a
    ``UserWarning``.
    """
    for path, module in root.named_modules():
        if not isinstance(module, nn.CrossEntropyLoss):
            continue
        if module.weight is not None or module.label_smoothing or module.ignore_index != -100:
            warnings.warn(
                f"{path or 'the root'} is not patched for sharded classes: it has weight, "
                "label_smoothing or ignore_index.",
                stacklevel=3,
            )
            continue
        patched: Any = module
        patched.forward = types.MethodType(_forward, module)


def _forward(self: nn.CrossEntropyLoss, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if (
        isinstance(input, DTensor)
        and input.ndim == 2
        and input.device_mesh.ndim == 1
        and input.placements[0].is_shard(1)
        and not target.is_floating_point()
    ):
        return VocabParallelCrossEntropy.forward(self, input, target)
    return type(self).forward(self, input, target)
