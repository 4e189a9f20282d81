# SPDX-License-Identifier: Apache-2.0
"""Names of parameters and buffers as users know them, whatever wraps the modules between."""

from collections.abc import Iterator

from torch import nn

from vescale.fsdp.param_group import ParamGroup
from vescale.fsdp.units import units_of

# What torch.compile, checkpoint_wrapper and FSDP1 put between a module and its name.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def clean_fqn(fqn: str) -> str:
    """Return ``fqn`` without the names of wrappers, which do not appear in checkpoints."""
    if not any(wrapper in fqn for wrapper in _WRAPPERS):
        return fqn
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def groups_in(module: nn.Module) -> Iterator[ParamGroup]:
    """Yield the parameter groups that modules under ``module`` compute with, each once."""
    seen = set()
    for unit in units_of(module, recurse=True):
        for group in unit.all_groups:
            if group not in seen:
                seen.add(group)
                yield group


def sharded_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return FQN and parameter, in the order of ``named_parameters``; ties by their first name.

    A wrapped parameter is the sharded one, also while the module holds the gathered one.
    """
    sharded = {
        id(item.gathered): item.sharded
        for group in groups_in(module)
        for item in group.managed
        if item.gathered is not None
    }
    return {
        clean_fqn(fqn): sharded.get(id(param), param) for fqn, param in module.named_parameters()
    }
