# SPDX-License-Identifier: Apache-2.0
"""Muon's step for the cut parameters of one process group."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vescale.fsdp.optim.cuts import local_of
from vescale.fsdp.optim.gather import BlockGather, Member, Transfer
from vescale.fsdp.optim.solver import Solver
from vescale.fsdp.optim.update import add_as_whole, narrow, scales


class ParamGather(BlockGather):
    """The cut parameters of one process group; ``solver`` orthogonalizes their matrices."""

    def __init__(self, members: Sequence[Member], solver: Solver, max_inflight_bytes: int) -> None:
        transfer = Transfer(solver.wire_dtype, max_inflight_bytes, solver.batched)
        super().__init__(members, transfer, "plan Muon's exchange")
        self._solver = solver

    def step(
        self,
        options: Mapping[torch.Tensor, Mapping[str, Any]],
        momentum_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Update all parameters and momenta; ``options`` are the parameters' groups."""
        locals_ = [_Local(param, momentum_of(param)) for param in self.params]

        def pack(index: int, out: torch.Tensor | None) -> None:
            number, piece = self.local_piece(index)
            mixed = locals_[number].mix(piece, options[self.params[number]])
            if out is not None:
                out.copy_(mixed)

        def solve(indices: Sequence[int], flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            places = [self.places[index] for index in indices]
            pairs = zip(flats, places, strict=True)
            matrices = [flat.view(block.shape) for flat, (_, block, _) in pairs]
            groups = [options[self.params[number]] for number, _, _ in places]
            return self._solver(matrices, groups)

        def unpack(index: int, update: torch.Tensor) -> None:
            number, piece = self.local_piece(index)
            block = self.places[index][1]
            weights = locals_[number].weights.narrow(0, *piece)
            decay, alpha = scales(block.shape, options[self.params[number]])
            weights.mul_(decay)
            update = narrow(update, weights).to(weights.device)
            start = self.exchange.own[index].start
            add_as_whole(weights, update, alpha, start, block.shape)

        self.exchange.run(self._wanted(), pack, solve, unpack)
        for local in locals_:
            local.store()

    def _wanted(self) -> list[bool]:
        """Tell which matrices have a gradient on one of their holders; collective if any is cut."""
        plan = self.exchange.plan
        if plan.is_local:
            return [self.params[number].grad is not None for number, _, _ in self.places]
        flags = self.gradient_flags()
        return [
            any(flags[piece.rank][number] for piece in matrix.pieces)
            for matrix, (number, _, _) in zip(plan.matrices, self.places, strict=True)
        ]


class _Local:
    """Flat views of a parameter, its momentum and its gradient on this rank.

    Copies where memory is not contiguous; ``store`` writes these back.
    """

    def __init__(self, param: torch.Tensor, momentum: torch.Tensor) -> None:
        self._parts = (local_of(param), local_of(momentum))
        self.weights, self._momentum = (part.contiguous().view(-1) for part in self._parts)
        self._grad = None if param.grad is None else local_of(param.grad).reshape(-1)

    def mix(self, piece: tuple[int, int], group: Mapping[str, Any]) -> torch.Tensor:
        """Update the momentum of a piece; return what to orthogonalize, flat."""
        momentum = self._momentum.narrow(0, *piece)
        if self._grad is None:  # another rank has one
            return mix(momentum, torch.zeros_like(momentum), group)
        return mix(momentum, self._grad.narrow(0, *piece), group)

    def store(self) -> None:
        for part, flat in zip(self._parts, (self.weights, self._momentum), strict=True):
            if not part.is_contiguous():
                part.copy_(flat.view(part.shape))


def mix(momentum: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Update ``momentum`` in place; return the matrix to orthogonalize, which may be it."""
    grad = grad.to(momentum.dtype)
    momentum.lerp_(grad, 1 - group["momentum"])
    return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
