# SPDX-License-Identifier: Apache-2.0
"""Embeddings whose vocabulary is cut: look up what this rank has, and add."""

import types
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.legacy._errors import LegacyValueError
from vescale.legacy.dmodule.placements_interface import PlacementsInterface
from vescale.legacy.dtensor.placement_types import Partial, Replicate
from vescale.legacy.dtensor.redistribution import redistribute_dtensor

__all__ = ["VocabParallelEmbedding", "patch_vocab_parallel_embedding"]


class VocabParallelEmbedding:
    """The forward of ``nn.Embedding`` with a weight under S(0) on one mesh dim."""

    @staticmethod
    def forward(module: Any, input: torch.Tensor) -> DTensor:
        """Return the rows of replicated indices ``input``, replicated: one all-reduce."""
        weight, mesh = module.weight, module.weight.device_mesh
        if isinstance(input, DTensor):
            if not all(placement.is_replicate() for placement in input.placements):
                raise LegacyValueError(
                    f"indices of a vocabulary-parallel embedding are under {input.placements}; "
                    "they must be replicated."
                )
            input = input.to_local()
        [axis] = [i for i, placement in enumerate(weight.placements) if placement.is_shard(0)]
        local = weight.to_local()
        first = mesh.get_local_rank(axis) * local.size(0)  # the rank on this dim, not of the world
        outside = (input < first) | (input >= first + local.size(0))
        rows = F.embedding((input - first).masked_fill(outside, 0), local)
        rows = rows.masked_fill(outside.unsqueeze(-1), 0.0)
        terms: list = [Replicate()] * mesh.ndim
        terms[axis] = Partial()
        out = DTensor.from_local(rows, mesh, terms, run_check=False)
        return redistribute_dtensor(out, mesh, [Replicate()] * mesh.ndim)


def patch_vocab_parallel_embedding(
    root: nn.Module, forward_plan: Mapping[str, Any], mesh: DeviceMesh
) -> None:
    """Patch embeddings with a weight under S(0) on one mesh dim, replicated on the others.

    ``ValueError``: the vocabulary does not divide. With an input plan that is not replicated, or
    with ``max_norm``, ``padding_idx`` or ``scale_grad_by_freq``: ``UserWarning``, and the forward
    raises ``NotImplementedError`` (message has ``row-wise sharded embedding``).
    """
    for path, module in root.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Embedding) or not isinstance(weight, DTensor):
            continue
        cuts = [axis for axis, placement in enumerate(weight.placements) if placement.is_shard(0)]
        if not cuts:
            continue
        patched: Any = module
        problem = _problem(module, forward_plan.get(f"{path}.input" if path else "input"))
        if len(cuts) > 1 or any(
            not placement.is_replicate()
            for axis, placement in enumerate(weight.placements)
            if axis not in cuts
        ):
            problem = f"its weight is under {weight.placements}"
        if problem is not None:
            warnings.warn(f"{path} is not patched: {problem}; calling it will raise.", stacklevel=3)
            patched._legacy_problem = f"{path} is a row-wise sharded embedding, and {problem}"
            patched.forward = types.MethodType(_refuse, module)
            continue
        if weight.size(0) % mesh.size(cuts[0]):
            raise LegacyValueError(
                f"{path}: a vocabulary of {weight.size(0)} does not divide by the "
                f"{mesh.size(cuts[0])} ranks of mesh dim {cuts[0]}; pad it."
            )
        patched.forward = types.MethodType(_forward, module)


def _problem(module: nn.Embedding, entry: Any) -> str | None:
    if module.max_norm is not None:
        return "max_norm is set, which needs whole rows of all ranks"
    if module.padding_idx is not None or module.scale_grad_by_freq or module.sparse:
        return "padding_idx, scale_grad_by_freq or sparse is set"
    entries = entry if isinstance(entry, list) else [entry]
    if isinstance(entry, Mapping):
        entries = list(entry.values())
    for each in entries:
        placements = each.placements if isinstance(each, PlacementsInterface) else None
        if placements is not None and not all(p.is_replicate() for p in placements):
            return f"its input plan is {placements}, expected Replicate"
    return None


def _forward(self: nn.Embedding, input: torch.Tensor) -> DTensor:
    return VocabParallelEmbedding.forward(self, input)


def _refuse(self: nn.Embedding, input: torch.Tensor) -> DTensor:
    raise NotImplementedError(f"{self._legacy_problem}.")
