# SPDX-License-Identifier: Apache-2.0
"""The API of the veScale of 2023 to 2025, by its old names, on stock torch.

What exists so far: ``dtensor``, ``dmodule``, ``model.patch``, ``ddp``, ``optim``,
``devicemesh_api`` and ``debug``.
Importing this package patches nothing and prints nothing.
"""

import importlib.metadata
from typing import TYPE_CHECKING

import vescale.legacy._shadow  # noqa: F401  first: refuses to load beside the old `vescale`

# isort: split
from vescale.legacy import ddp, debug, devicemesh_api, dmodule, dtensor, model, optim
from vescale.legacy.compatibility import (
    deprecated_function,
    disable_jit_script,
    install,
    switch_dtensor_for_torch_export,
)
from vescale.legacy.ddp import DistributedDataParallel
from vescale.legacy.dmodule import PlacementsInterface, is_dmodule, parallelize_module
from vescale.legacy.dtensor import (
    DeviceMesh,
    DTensor,
    InterleavedShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    from_local,
    init_device_mesh,
    normalize_placements,
    redistribute_dtensor,
    to_local,
    vescale_all_gather,
    vescale_all_reduce,
    vescale_reduce_scatter,
)
from vescale.legacy.optim import BasicOptimizer, BasicOptimizerHook, DistributedOptimizer

__all__ = [
    "BasicOptimizer",
    "BasicOptimizerHook",
    "DTensor",
    "DeviceMesh",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "InterleavedShard",
    "Partial",
    "Placement",
    "PlacementsInterface",
    "Replicate",
    "Shard",
    "ddp",
    "debug",
    "deprecated_function",
    "devicemesh_api",
    "disable_jit_script",
    "distribute_tensor",
    "dmodule",
    "dtensor",
    "from_local",
    "init_device_mesh",
    "install",
    "is_dmodule",
    "model",
    "normalize_placements",
    "optim",
    "parallelize_module",
    "redistribute_dtensor",
    "switch_dtensor_for_torch_export",
    "to_local",
    "vescale_all_gather",
    "vescale_all_reduce",
    "vescale_reduce_scatter",
]


if TYPE_CHECKING:  # to a checker, __getattr__ would make every misspelt name a str
    __version__: str
else:

    def __getattr__(name: str) -> str:
        if name == "__version__":
            return importlib.metadata.version("vescale-legacy")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
