# SPDX-License-Identifier: Apache-2.0
"""Give a model's tensors on the meta device memory; ties, names and parameter objects stay."""

import torch
from torch import nn

from vescale.fsdp.fqns import clean_fqn, groups_in
from vescale.fsdp.inference import ordinary_tensors


def meta_names(module: nn.Module) -> list[str]:
    """Return the FQNs of the parameters and buffers on the meta device, ties by each name."""
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return [clean_fqn(fqn) for fqn, tensor in tensors if tensor.is_meta]


@ordinary_tensors
def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate what is on the meta device, with undefined contents.

    Wrapped parameters stay the objects that they are, and lie on their mesh's device; a plain
    parameter or buffer is replaced, wherever it is registered, by one on ``device``.
    """
    for group in groups_in(module):
        group.materialize()
    fresh: dict[int, torch.Tensor] = {}
    for submodule in module.modules():
        for registry in (submodule._parameters, submodule._buffers):
            for name, tensor in registry.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in fresh:
                        fresh[id(tensor)] = _allocate(tensor, device)
                    registry[name] = fresh[id(tensor)]  # type: ignore[assignment]  # of its kind


def _allocate(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    memory = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    vars(memory).update(vars(tensor))
    return memory
