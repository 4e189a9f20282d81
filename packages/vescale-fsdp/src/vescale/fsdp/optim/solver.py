# SPDX-License-Identifier: Apache-2.0
"""Orthogonalize the matrices that are at hand, one by one or equal ones together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale.fsdp.optim.newton_schulz import Coefficients, batched_newton_schulz, newton_schulz

NewtonSchulz = Callable[[torch.Tensor, Coefficients, int, float], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Solver:
    """Apply Newton-Schulz, or ``ns_fn``; results are in ``wire_dtype``.

    ``batched`` solves equal matrices with equal options at once.
    """

    wire_dtype: torch.dtype
    batched: bool
    ns_fn: NewtonSchulz | None

    def __call__(
        self, matrices: Sequence[torch.Tensor], groups: Sequence[Mapping[str, Any]]
    ) -> list[torch.Tensor]:
        """Return the matrices orthogonalized, each by the options of its group."""
        pairs = list(zip(matrices, groups, strict=True))
        if not self.batched or len(matrices) == 1:
            return [self._one(matrix, _ns_options(group)) for matrix, group in pairs]
        alike: dict[tuple, list[int]] = {}
        for place, (matrix, group) in enumerate(pairs):
            alike.setdefault((matrix.shape, id(group)), []).append(place)
        results: list[Any] = [None] * len(matrices)
        for places in alike.values():
            stack = torch.stack([matrices[place] for place in places])
            solved = batched_newton_schulz(stack, *_ns_options(groups[places[0]]))
            for place, result in zip(places, solved, strict=True):
                results[place] = result.to(self.wire_dtype)
        return results

    def _one(self, matrix: torch.Tensor, options: tuple) -> torch.Tensor:
        result = (self.ns_fn or newton_schulz)(matrix, *options)
        if result.shape != matrix.shape:
            raise ValueError(
                f"ns_fn returned shape {tuple(result.shape)} for a matrix of shape "
                f"{tuple(matrix.shape)}; it must return the same shape."
            )
        return result.to(self.wire_dtype)


def _ns_options(group: Mapping[str, Any]) -> tuple:
    return group["ns_coefficients"], group["ns_steps"], group["eps"]
