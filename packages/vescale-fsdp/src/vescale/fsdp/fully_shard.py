# SPDX-License-Identifier: Apache-2.0
"""The entry point: shard a module's parameters and gather them around its forward."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from vescale.dtensor import is_ragged_shard
from vescale.dtensor.tensor import local_of
from vescale.fsdp import param_group, saved_tensors, unit
from vescale.fsdp._torch_compat import leave_untraced
from vescale.fsdp.agreement import agree_everywhere
from vescale.fsdp.arguments import check_reshard, reshard_over
from vescale.fsdp.data_mesh import DataMesh, data_mesh_of
from vescale.fsdp.early_optimizers import note_wrap
from vescale.fsdp.extension import ExtensionGroup, check_rows, has_extension
from vescale.fsdp.forward_methods import register_fsdp_forward_method
from vescale.fsdp.granularity import Granularity, resolve_granularity
from vescale.fsdp.managed import OWNER_ATTRIBUTE, Managed
from vescale.fsdp.module import FSDPModule, run_gathered
from vescale.fsdp.offload import check_offload
from vescale.fsdp.parallel import parallel_meshes, parallel_of
from vescale.fsdp.param_group import ParamGroup
from vescale.fsdp.policy import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    check_policy,
)
from vescale.fsdp.shard_placement import PlacementFn, check_placement_fn, data_mesh_for
from vescale.fsdp.unit import Unit
from vescale.fsdp.units import UNIT

_wrapped_classes: dict[type, type] = {}


@overload
def fully_shard(module: nn.Module, **options: Any) -> FSDPModule: ...


@overload
def fully_shard(module: list[nn.Module], **options: Any) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (has no fields)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    granularity: Granularity | Callable[[str, nn.Parameter], Granularity] | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard ``module``'s parameters over ``mesh``, in place, and return it.

    Parameters of submodules that are wrapped already stay with them, so wrap from the inside out:
    each block, then the model. All parameters of one call are gathered together, before the
    module's forward, and their gradients reduced together.

    A list of modules becomes one unit: one gather before the first of them runs, one reduction,
    and memory freed when all have run, or when the outermost forward ends. One of them may be
    called again by itself later, such as the head for each chunk of a loss; it then stays gathered
    until its backward. Modules inside others of the list belong to these.

    - ``mesh``: 1-D, or 2-D for hybrid sharding: the first axis holds replicas, the second one
      shards. Default: all ranks of the default process group. Parameters that are DTensors on
      another axis of the same mesh (tensor or expert parallelism) are cut once more.
    - ``reshard_after_forward``: free the full parameters after forward and gather them again in
      backward (True), or keep them (False). None: True, but False for the root while gradients
      are on. A number K that divides the ranks that shard: keep a copy cut over each K of them that
      follow one another, say those of one host, to gather from in backward. The module has its
      ordinary sharded parameters meanwhile.
    - ``shard_placement_fn``: a function of a parameter that returns None, ``Shard(dim)`` or a
      ``ShardPlacementResult``, as in torch's FSDP2. The mesh of the latter is where the parameter
      is sharded and its gradients are averaged, for experts on a mesh of their own. Any dim is
      accepted and none changes the layout: a cut wastes nothing, wherever it is.
    - ``mp_policy``: dtypes of computation, reduction and output, as in torch's FSDP2.
    - ``offload_policy``: ``CPUOffloadPolicy()`` keeps sharded parameters, their gradients and so
      optimizer states on the CPU: shards are copied to the mesh's device on their way into each
      gather, reduced gradients back. Its memory is pinned unless ``pin_memory=False``. On a mesh
      of CPUs nothing is copied and nothing pinned.
    - ``ignored_params``: parameters to leave as they are.
    - ``dp_mesh_dims``: the names of the axes of ``mesh``, of any number, that shard and replicate,
      as in torch's FSDP2. With ``replicate`` only, parameters stay whole and nothing is gathered
      from other ranks. Parameters may be plain, or DTensors on ``mesh`` that are replicated on
      these axes, or on other axes of it.
    - ``granularity``: how finely a parameter may be cut: ``Elements()``, ``Rows(n)``,
      ``Block(dims, n)``, ``Whole()``, or a function ``(fqn, param)`` that returns one. Default:
      ``Rows(1)``, ``Block(2, 1)`` for more than two dims (the rows of fused experts), and
      ``Elements()`` for fewer. Names are relative to ``module``; in a list of several they begin
      with the module's place in it, as "1.weight".

    Returns what was passed. Afterwards ``module``'s class is ``FSDP<its class>``, a subclass of it
    and of ``FSDPModule``; its parameters are ``nn.Parameter``s holding RaggedShard DTensors, views
    of one flat buffer per dtype. Values are taken from this rank's memory: all ranks must hold the
    same. Build optimizers after the call: the step of one that holds replaced parameters is
    refused.

    Raises on every rank alike, and before anything is changed: TypeError, ValueError or
    NotImplementedError for arguments; RuntimeError without a process group, or if the ranks wrap
    different things.
    """
    leave_untraced(run_gathered, *param_group.HOOKS, *saved_tensors.HOOKS, *unit.HOOKS)
    modules = _roots(module)
    check_reshard(reshard_after_forward)
    check_policy(mp_policy)
    check_offload(offload_policy)
    _check_ignored(ignored_params)
    _check_dims(dp_mesh_dims)
    check_placement_fn(shard_placement_fn)
    mesh = _check_mesh(mesh, modules)
    data = data_mesh_of(mesh, dp_mesh_dims)
    reshard = reshard_over(reshard_after_forward, data.shards)
    if reshard is None and data.shard_axis is None:
        reshard = False  # no other rank's memory to save it for
    device = _device(mesh)
    own = _own_params(modules, ignored_params or set())
    meshes = [data.groups, *(other.get_all_groups()[::-1] for other in parallel_meshes(own))]
    found: list[list[Managed]] = []
    borrowed: list[ParamGroup] = []
    error = None
    try:
        items, ties = _collect(
            modules, ignored_params or set(), granularity, shard_placement_fn, data
        )
        _check_devices(items, _names(modules), device)
        found = _split(items)
        for items in found:  # they may be on meshes of their own
            reshard_over(reshard_after_forward, items[0].data.shards)
    except Exception as caught:  # also what the caller's granularity function may raise
        error = caught  # agree() raises it, here and on the other ranks
    described = _describe(modules, data, f"{mp_policy}, {offload_policy}", reshard, found)
    agree_everywhere(meshes, device, "wrap the module", described, error)
    others = dict.fromkeys(items[0].data for items in found if items[0].data != data)
    agree_everywhere([mesh.groups for mesh in others], device, "wrap the module", described)
    groups = [
        (ExtensionGroup if has_extension(items[0].original) else ParamGroup)(
            items, items[0].data, device, mp_policy, offload_policy
        )
        for items in found
    ]
    for group in groups:
        group.shard()
        over = reshard_over(reshard_after_forward, group.data.shards)
        if not isinstance(over, bool | None):
            group.keep_after_forward(over)
            reshard = over
    for (owner, index), slots in ties.items():
        owner.managed[index].slots.extend(slots)
        owner.managed[index].register(owner.managed[index].sharded)
        owner.lent = True
        if owner not in borrowed:
            borrowed.append(owner)
    _move_buffers(modules, device)
    wrapped = Unit(modules, groups, borrowed, mp_policy, reshard)
    for each in modules:
        each.__dict__[UNIT] = wrapped
        each.__class__ = _wrapped_class(type(each))
        if "forward" in each.__dict__:  # set on the instance, as torch.compile and others do
            register_fsdp_forward_method(each, "forward")
    note_wrap()
    return module


def _wrapped_class(cls: type) -> type:
    if cls not in _wrapped_classes:
        namespace = {"__module__": cls.__module__}
        _wrapped_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), namespace)
    return _wrapped_classes[cls]


def _roots(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
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


def _names(modules: Sequence[nn.Module]) -> str:
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
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ValueError(
            f"{type(module).__name__} has no forward to gather for; wrap the modules inside it, "
            "or a module around it that has one."
        )


def _check_ignored(ignored: set[nn.Parameter] | None) -> None:
    if ignored is not None and (
        isinstance(ignored, (str, torch.Tensor))
        or not all(isinstance(param, nn.Parameter) for param in ignored)
    ):
        raise TypeError(
            f"ignored_params is {type(ignored).__name__} and holds other things than parameters, "
            "expected a set of nn.Parameter; pass for example {module.weight}."
        )


def _check_dims(dims: DataParallelMeshDims | None) -> None:
    if dims is not None and not isinstance(dims, DataParallelMeshDims):
        raise TypeError(
            f"dp_mesh_dims is a {type(dims).__name__}, expected a DataParallelMeshDims; pass for "
            "example DataParallelMeshDims(shard='fsdp', replicate='ddp')."
        )


def _check_mesh(mesh: DeviceMesh | None, modules: Sequence[nn.Module]) -> DeviceMesh:
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


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def _collect(
    modules: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    granularity: Granularity | Callable[[str, nn.Parameter], Granularity] | None,
    placement_fn: PlacementFn | None,
    data: DataMesh,
) -> tuple[list[Managed], dict[tuple[ParamGroup, int], list]]:
    """Return the parameters that the unit will manage, and its ties to other units'."""
    found: dict[int, Managed] = {}
    ties: dict[tuple[ParamGroup, int], list] = {}
    ignored_ids = {id(param) for param in ignored}
    whole_meshes: dict[tuple[DeviceMesh, DeviceMesh], DeviceMesh] = {}
    for prefix, submodule in _unwrapped(modules):
        for name, param in submodule._parameters.items():
            if param is None or id(param) in ignored_ids:
                continue
            fqn, slot = f"{prefix}{name}", (weakref.ref(submodule), name)
            owner = getattr(param, OWNER_ATTRIBUTE, None)
            group = owner[0]() if owner is not None else None
            if group is not None:
                ties.setdefault((group, owner[1]), []).append(slot)
            elif id(param) in found:
                found[id(param)].slots.append(slot)
            else:
                _check_param(fqn, param)
                chosen = resolve_granularity(granularity, fqn, param)
                own = data_mesh_for(placement_fn, fqn, param, data)
                if has_extension(param):
                    check_rows(fqn, param, own.shards)
                parallel = parallel_of(fqn, param, own, whole_meshes)
                found[id(param)] = Managed(fqn, [slot], param, chosen, own, parallel)
    return list(found.values()), ties


def _unwrapped(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (prefix, module) of ``modules`` and what is under them, down to wrapped submodules."""
    seen = set()
    prefixes = [""] if len(modules) == 1 else [f"{place}." for place in range(len(modules))]
    stack = list(zip(prefixes, modules, strict=True))[::-1]
    while stack:
        prefix, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield prefix, module
        children = [
            (f"{prefix}{name}.", child)
            for name, child in module.named_children()
            if not isinstance(child, FSDPModule)
        ]
        stack.extend(reversed(children))


def _own_params(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[nn.Parameter]:
    ignored_ids = {id(param) for param in ignored}
    return [
        param
        for _, submodule in _unwrapped(modules)
        for param in submodule._parameters.values()
        if param is not None
        and id(param) not in ignored_ids
        and not any(is_ragged_shard(p) for p in getattr(param, "placements", ()))
    ]


def _check_param(fqn: str, param: nn.Parameter) -> None:
    if isinstance(param, nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"{fqn} is not initialised; run one forward of the lazy module first.")
    if any(is_ragged_shard(p) for p in getattr(param, "placements", ())):
        raise ValueError(
            f"{fqn} is sharded by fully_shard already, as part of another module; wrap from the "
            "inside out, and tie parameters before the first call."
        )
    local = local_of(param) if isinstance(param, DTensor) else param
    if has_extension(param):
        return
    if not _holds_plain_data(local):
        raise NotImplementedError(
            f"{fqn} is a {type(local).__name__}, expected an nn.Parameter, or a subclass of it "
            "without __torch_function__ and __torch_dispatch__, or a tensor subclass with "
            "fsdp_pre_all_gather and fsdp_post_all_gather. Pass it in ignored_params to leave it "
            "as it is."
        )
    if param.is_complex() and param.requires_grad:
        raise NotImplementedError(
            f"{fqn} is complex ({param.dtype}) and trainable, which is not supported yet; "
            "store it as real numbers and use torch.view_as_complex in forward."
        )


def _holds_plain_data(tensor: torch.Tensor) -> bool:
    """Tell whether operators treat ``tensor`` as the plain memory that it is."""
    cls = type(tensor)
    if cls in (torch.Tensor, nn.Parameter):
        return True
    plain = (nn.Parameter.__torch_function__, torch.Tensor.__torch_dispatch__)
    return issubclass(cls, nn.Parameter) and plain == (
        cls.__torch_function__,
        cls.__torch_dispatch__,
    )


def _check_devices(items: list[Managed], name: str, device: torch.device) -> None:
    for item in items:
        kind = item.original.device
        if kind.type not in ("meta", "cpu") and kind != device:
            raise ValueError(
                f"{item.fqn} of {name} is on {kind}, but the mesh is on {device}; move the module "
                f"to {device} (or to the CPU) before fully_shard."
            )
    meta = [item.fqn for item in items if item.original.is_meta]
    real = [item.fqn for item in items if not item.original.is_meta]
    if meta and real:
        raise ValueError(
            f"{name} has {meta[0]} on the meta device and {real[0]} on {device}; materialise all "
            "of the module's parameters before fully_shard, or none."
        )


def _split(items: list[Managed]) -> list[list[Managed]]:
    """Split into groups, in order of appearance: one needs one mesh, dtype and requires_grad.

    Uneven tensor-parallel parameters are laid out by each of their ranks in its own way. What else
    is in the unit must be cut alike by all, since a checkpoint holds it once.
    """
    groups: dict[tuple, list[Managed]] = {}
    for item in items:
        param = item.original
        key = (item.data, param.dtype, param.requires_grad, item.uneven)
        if has_extension(param):  # each has a gather of its own
            key = (id(item),)
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def _describe(
    modules: Sequence[nn.Module],
    data: DataMesh,
    policies: str,
    reshard: bool | int | None,
    groups: list[list[Managed]],
) -> str:
    """Return a text that is equal on two ranks exactly if they wrap alike; a line a parameter."""
    lines = [
        f"{_names(modules)} over {data.replicas} x {data.shards} ranks with {policies} "
        f"and reshard_after_forward={reshard}",
    ]
    for items in groups:
        for item in items:
            p = item.original
            lines.append(
                f"{item.fqn}: {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad} "
                f"{item.granularity}{_describe_mesh(item, data)}"
            )
    return "\n".join(lines)


def _describe_mesh(item: Managed, data: DataMesh) -> str:
    text = ""
    if item.parallel is not None:
        text += f" {item.parallel.placements} on {item.parallel.mesh.mesh_dim_names}"
    if item.data != data:
        own = item.data
        text += f" over {own.replicas} x {own.shards} ranks of {own.mesh.mesh_dim_names}"
    return text


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for _, submodule in _unwrapped(modules):
        for name, buffer in submodule._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                submodule._buffers[name] = buffer.to(device)
