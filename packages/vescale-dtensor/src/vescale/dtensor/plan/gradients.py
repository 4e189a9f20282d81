# SPDX-License-Identifier: Apache-2.0
"""Give gradients their parameters' placements at the end of backward, in few collectives."""

import torch
from torch import nn
from torch.distributed.tensor import Placement

from vescale.dtensor._torch_compat import TorchDTensor, current_backward, on_backward_end
from vescale.dtensor.many import redistribute_many
from vescale.dtensor.tensor import DTensor

NO_BACKWARD = -1


class GradientPlacements:
    """The parameters of one model whose gradients are watched."""

    def __init__(self) -> None:
        self._wanted: list[tuple[nn.Parameter, tuple[Placement, ...]]] = []
        self._waiting: set[int] = set()
        self._backward = NO_BACKWARD

    def watch(self, param: nn.Parameter, placements: tuple[Placement, ...]) -> None:
        """Leave the gradients of ``param`` in ``placements``."""
        index = len(self._wanted)
        self._wanted.append((param, placements))
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda param: self._note(index, param))

    def _note(self, index: int, param: nn.Parameter) -> None:
        grad = param.grad
        if not isinstance(grad, TorchDTensor) or grad.placements == self._wanted[index][1]:
            return
        if self._backward != current_backward():  # the first of this pass; an earlier one may
            self._backward = current_backward()  # have ended in an error
            self._waiting.clear()
            on_backward_end(self._move)
        self._waiting.add(index)

    def _move(self) -> None:
        waiting, self._backward = sorted(self._waiting), NO_BACKWARD
        self._waiting.clear()
        params = [self._wanted[index] for index in waiting]
        with torch.no_grad():
            moved = redistribute_many(
                [param.grad for param, _ in params],  # type: ignore[misc]  # _note saw them
                [wanted for _, wanted in params],
            )
        for (param, _), grad in zip(params, moved, strict=True):
            param.grad = grad if isinstance(param, DTensor) else grad.as_torch()
