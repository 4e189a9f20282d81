# SPDX-License-Identifier: Apache-2.0
"""The names of the old package that exist here, counted as the page for its users says."""

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "move-from-old-vescale.md"

# By module, "" being the root; as programs of 2023 to 2025 import them.
NAMES = {
    "": """
        __version__ parallelize_module is_dmodule PlacementsInterface
        auto_parallelize_module set_plan_overriding_policy get_plan_overriding_policy
        DTensor DeviceMesh init_device_mesh normalize_placements from_local to_local
        distribute_tensor redistribute_dtensor vescale_all_gather vescale_all_reduce
        vescale_reduce_scatter Placement Partial Replicate Shard InterleavedShard
        deferred_init is_deferred materialize_dtensor materialize_dparameter
        DistributedDataParallel DistributedOptimizer BasicOptimizer BasicOptimizerHook
        checkpoint deprecated_function switch_dtensor_for_torch_export
    """,
    "dtensor": """
        distribute_tensor from_local to_local redistribute_dtensor vescale_all_gather
        vescale_all_reduce vescale_reduce_scatter normalize_placements DTensor zeros
        ones empty full randn rand arange equal allclose DeviceMesh init_device_mesh
    """,
    "dtensor._utils": """
        compute_local_shape compute_local_shape_and_global_offset compute_local_offset
        compute_global_tensor_info gather_local_tensor_shape compute_global_stride
        is_zero_out_local_shard
    """,
    "dtensor.placement_types": """
        Placement Shard Replicate Partial InterleavedShard DTensorSpec TensorMeta
    """,
    "dtensor.loss": "loss_parallel",
    "dtensor._diff": "DeferReshardMode dummy_p2p",
    "dtensor.random": """
        manual_seed is_rng_supported_mesh init_vescale_rng_tracker _rng_tracker
        ThreadBasedRNGTracker OffsetBasedRNGTracker TensorParallelRNGTracker
    """,
    "dtensor.device_mesh": "DeviceMesh init_device_mesh",
    "dtensor._collective_utils": """
        mesh_broadcast mesh_scatter mesh_all_gather mesh_reduce_scatter mesh_all_reduce
        mesh_all_to_all mesh_all_to_all_single wait mesh_wait
    """,
    "dmodule": "parallelize_module is_dmodule PlacementsInterface",
    "dmodule.api": "parallelize_module is_dmodule",
    "dmodule._dmodule": "DModule",
    "dmodule.placements_interface": "PlacementsInterface",
    "dmodule._factory": "FactoryDispatchModeOn FactoryDispatchModeOff _provide_args",
    "model.patch": "get_all_model_patch",
    "model.patch.vp_embedding": "VocabParallelEmbedding",
    "model.patch.vp_cross_entropy": "VocabParallelCrossEntropy _VocabParallelCrossEntropy",
    "model.patch.linear": "RowParallelLinear",
    "ddp.distributed_data_parallel": "DistributedDataParallel",
    "ddp": "DistributedDataParallel",
    "optim.base_optimizer": "BasicOptimizer BasicOptimizerHook GradOptimizerHookBase",
    "optim.distributed_optimizer": "DistributedOptimizer OptimizerStateSpec Range",
    "optim.utils": "param_is_sharded_or_replicate_on_first_rank initialize_optimizer_state Range",
    "optim.clip_grads": "clip_grad_norm_fp32",
    "devicemesh_api": "VESCALE_DEVICE_MESH VeDeviceMesh",
    "debug": "DebugLogger",
    "debug.pdb": "ForkedPdb",
}
# What the page calls the modules of a row -> how they begin.
ROWS = {
    "of the root": ("",),
    "of `dtensor`": ("dtensor",),
    "of `dmodule` and `model.patch`": ("dmodule", "model"),
    "of `ddp` and `optim`": ("ddp", "optim"),
    "of `devicemesh_api` and `debug`": ("devicemesh_api", "debug"),
}


def exists(module, name):
    return hasattr(importlib.import_module(f"vescale.legacy.{module}".rstrip(".")), name)


def test_the_page_counts_and_names_what_is_missing():
    text = PAGE.read_text()
    for row, begins in ROWS.items():
        names = {
            (module, name)
            for module, listed in NAMES.items()
            for name in listed.split()
            if module.split(".")[0] in begins
        }
        missing = {name for module, name in names if not exists(module, name)}
        there = sum(exists(module, name) for module, name in names)
        found = re.search(rf"\| {re.escape(row)} \| (\d+) of (\d+) \|(.*)\|", text)
        assert found, row
        assert (int(found[1]), int(found[2])) == (there, len(names)), row
        assert set(re.findall(r"`(\w+)`", found[3])) == missing, row
