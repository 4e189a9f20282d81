# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallel with torch's ``fully_shard`` API, on RaggedShard parameters."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import vescale.fsdp._shadow  # noqa: F401  first: refuses to load beside the old `vescale`
from vescale.fsdp.block_scaled import BlockScaled
from vescale.fsdp.finalization import GradientReductionHandle
from vescale.fsdp.forward_methods import register_fsdp_forward_method
from vescale.fsdp.full_parameters import iter_full_parameters
from vescale.fsdp.full_state import load_full_state_dict
from vescale.fsdp.fully_shard import fully_shard
from vescale.fsdp.grad_norm import clip_grad_norm_
from vescale.fsdp.granularity import (
    Block,
    Elements,
    Granularity,
    Rows,
    Whole,
)
from vescale.fsdp.init_empty import InitReport, init_empty
from vescale.fsdp.module import FSDPModule, UnshardHandle
from vescale.fsdp.policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from vescale.fsdp.presets import granularity_for
from vescale.fsdp.reduce_settings import no_sync
from vescale.fsdp.sharing import share_comm_ctx

__all__ = [
    "Block",
    "BlockScaled",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Elements",
    "FSDPModule",
    "GradientReductionHandle",
    "Granularity",
    "InitReport",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Rows",
    "UnshardHandle",
    "Whole",
    "clip_grad_norm_",
    "fully_shard",
    "granularity_for",
    "init_empty",
    "iter_full_parameters",
    "load_full_state_dict",
    "no_sync",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

_MODULES = ("checkpoint", "inspect", "optim", "state_dict")

if TYPE_CHECKING:  # to a checker, __getattr__ would make every misspelt name a module
    from vescale.fsdp import checkpoint as checkpoint
    from vescale.fsdp import inspect as inspect
    from vescale.fsdp import optim as optim
    from vescale.fsdp import state_dict as state_dict
else:

    def __getattr__(name: str) -> ModuleType:
        """Import a public module where it is used as an attribute, ``vescale.fsdp.optim.Muon``."""
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
