# SPDX-License-Identifier: Apache-2.0
"""Row-parallel linear layers: reduce first, add the bias once."""

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
from vescale.legacy.dmodule.placing import place_tensor

__all__ = ["RowParallelLinear", "patch_row_parallel_linear"]


class RowParallelLinear:
    """The forward of ``nn.Linear`` with a weight cut on its input dim."""

    @staticmethod
    def forward(module: Any, input: torch.Tensor) -> torch.Tensor:
        """Return the product, brought to the output plan, and then the bias added."""
        entry, mesh = module._legacy_output_plan
        return place_tensor(F.linear(input, module.weight), entry, mesh) + module.bias


def patch_row_parallel_linear(
    root: nn.Module, forward_plan: Mapping[str, Any], mesh: DeviceMesh
) -> None:
    """Patch linear layers with a bias, a weight under S(1) on one mesh dim and an output plan.

    ``ValueError``: S(1) on two mesh dims. ``UserWarning``: no output plan; the layer stays as it
    is, and its result is partial, with a partial bias.
    """
    for path, module in root.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or not isinstance(weight, DTensor):
            continue
        cuts = [axis for axis, placement in enumerate(weight.placements) if placement.is_shard(1)]
        if not cuts or module.bias is None:
            continue
        if len(cuts) > 1:
            raise LegacyValueError(
                f"{path}.weight is under Shard(1) on mesh dims {cuts}; a row-parallel linear layer "
                "is cut by one."
            )
        entry = forward_plan.get(f"{path}.output" if path else "output")
        if isinstance(entry, list) and len(entry) == 1:
            entry = entry[0]
        if not isinstance(entry, PlacementsInterface) or entry.placements is None:
            warnings.warn(
                f"{path} has a weight under Shard(1), a bias, and no output in the forward plan: "
                "each rank adds the bias to its term. Add an output to reduce first.",
                stacklevel=3,
            )
            continue
        patched: Any = module
        patched._legacy_output_plan = (entry, mesh)
        patched.forward = types.MethodType(_forward, module)


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return RowParallelLinear.forward(self, input)
