# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fully_shard``, checked, and what their defaults stand for."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule as StockModule

from vescale.fsdp.module import FSDPModule
from vescale.fsdp.policy import DataParallelMeshDims


def roots_of(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules to wrap, checked: those of a list that are not inside another of it."""
    if isinstance(module, nn.Module):
        modules = [module]
    elif isinstance(module, (list, tuple)):
        modules = list({id(each): each for each in module}.values())
        if not modules:
            raise ValueError("module is an empty list; pass the modules to shard together.")
    else:
        raise TypeError(
            f"module is a {type(module).__name__}, expected an nn.Module or a list of them."
        )
    for each in modules:
        _check_module(each)
    inside = {id(m) for each in modules for m in each.modules() if m is not each}
    return [each for each in modules if id(each) not in inside]


def modules_in(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules in what ``roots_of`` has still to check."""
    several = module if isinstance(module, (list, tuple)) else [module]
    return [each for each in several if isinstance(each, nn.Module)]


def names_of(modules: Sequence[nn.Module]) -> str:
    return ", ".join(type(module).__name__ for module in modules)


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"the list holds a {type(module).__name__}, expected only modules (nn.Module)."
        )
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"{type(module).__name__} is wrapped already; call fully_shard once per module."
        )
    for name, inner in module.named_modules():
        if isinstance(inner, StockModule):
            raise ValueError(
                f"{name or type(module).__name__} is wrapped by torch.distributed.fsdp's "
                "fully_shard; import fully_shard from vescale.fsdp for every module of a model."
            )
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ValueError(
            f"{type(module).__name__} has no forward to gather for; wrap the modules inside it, "
            "or a module around it that has one."
        )


def ignored_set(ignored: Iterable[nn.Parameter] | None) -> set[nn.Parameter]:
    """Return ``ignored_params`` as a set, also where it can be gone through only once."""
    given = [] if ignored is None else ignored
    holds = ""
    if isinstance(given, Iterable) and not isinstance(given, (str, torch.Tensor)):
        found = list(given)
        wrong = [param for param in found if not isinstance(param, nn.Parameter)]
        if not wrong:
            return set(found)
        holds = f" that holds a {type(wrong[0]).__name__}"
    raise TypeError(
        f"ignored_params is a {type(ignored).__name__}{holds}, expected a set of nn.Parameter; "
        "pass for example {module.weight}."
    )


def check_dims(dims: DataParallelMeshDims | None) -> None:
    if dims is not None and not isinstance(dims, DataParallelMeshDims):
        raise TypeError(
            f"dp_mesh_dims is a {type(dims).__name__}, expected a DataParallelMeshDims; pass for "
            "example DataParallelMeshDims(shard='fsdp', replicate='ddp')."
        )


def check_mesh(mesh: DeviceMesh | None, modules: Sequence[nn.Module]) -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group and there is none; start the script with torchrun "
            "and call torch.distributed.init_process_group() first."
        )
    if mesh is None:
        return init_device_mesh(_default_device_type(modules), (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}, expected a DeviceMesh; pass for example "
            "init_device_mesh('cpu', (world_size,))."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh of {mesh.size()} ranks over a world of "
            f"{dist.get_world_size()}; call fully_shard on the mesh's ranks only, or pass a mesh "
            "of all ranks."
        )
    return mesh


def _default_device_type(modules: Sequence[nn.Module]) -> str:
    kinds = {param.device.type for module in modules for param in module.parameters()} - {
        "meta",
        "cpu",
    }
    if kinds:
        return kinds.pop()
    return "cuda" if "nccl" in dist.get_backend() else "cpu"


def device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)
