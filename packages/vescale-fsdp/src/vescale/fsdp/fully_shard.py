# SPDX-License-Identifier: Apache-2.0
"""The entry point: shard a module's parameters and gather them around its forward."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.fsdp import param_group, saved_tensors, unit
from vescale.fsdp._torch_compat import leave_untraced
from vescale.fsdp.agreement import agree_everywhere
from vescale.fsdp.arguments import check_reshard, reshard_over
from vescale.fsdp.block_scaled import BlockScaled, check_gather_as
from vescale.fsdp.collecting import (
    check_devices,
    check_tiles,
    collect,
    describe,
    own_params,
    split,
    unwrapped,
)
from vescale.fsdp.data_mesh import data_mesh_of
from vescale.fsdp.early_optimizers import note_wrap
from vescale.fsdp.extension import ExtensionGroup, has_extension
from vescale.fsdp.forward_methods import register_fsdp_forward_method
from vescale.fsdp.granularity import Granularity
from vescale.fsdp.inference import ordinary_tensors
from vescale.fsdp.lanes import check_lanes
from vescale.fsdp.managed import Managed
from vescale.fsdp.module import FSDPModule, run_gathered
from vescale.fsdp.offload import check_offload
from vescale.fsdp.parallel import parallel_meshes
from vescale.fsdp.param_group import ParamGroup
from vescale.fsdp.policy import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    check_policy,
    describe_options,
)
from vescale.fsdp.shard_placement import PlacementFn, check_placement_fn
from vescale.fsdp.unit import Unit
from vescale.fsdp.units import UNIT
from vescale.fsdp.wrap_arguments import (
    check_dims,
    check_mesh,
    device_of,
    ignored_set,
    modules_in,
    names_of,
    roots_of,
)

_wrapped_classes: dict[type, type] = {}

Wrapped = TypeVar("Wrapped", bound=nn.Module)  # lists of one kind of module are lists of modules


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    granularity: Granularity | Callable[[str, nn.Parameter], Granularity] | None = ...,
    lanes: int | Literal["auto"] = ...,
    gather_as: BlockScaled | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[Wrapped],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    granularity: Granularity | Callable[[str, nn.Parameter], Granularity] | None = ...,
    lanes: int | Literal["auto"] = ...,
    gather_as: BlockScaled | None = ...,
) -> list[FSDPModule]: ...


@ordinary_tensors
def fully_shard(
    module: nn.Module | list[Wrapped],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (has no fields)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    granularity: Granularity | Callable[[str, nn.Parameter], Granularity] | None = None,
    lanes: int | Literal["auto"] = "auto",
    gather_as: BlockScaled | None = None,
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
      From torch 2.15 on, its ``param_dtype_override_fn`` may keep parameters in their own dtype.
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
    - ``lanes``: how many buffers, gathered and reduced in one launch, share the parameters of one
      dtype, so that one with long rows does not force padding on all others. "auto": up to 3, where
      that saves more than a further collective costs; 1: one buffer; 2 or 3: so many.
    - ``gather_as``: ``BlockScaled(dtype, block)`` sends weights as codes of one byte with a scale
      for each tile, found on the rank that has the tile, and computes with what they stand for.
      Gradients, optimizer states and checkpoints are those of the sharded parameters, which stay
      exact. The granularity must keep tiles whole, and does by default. Results do not depend on
      the number of ranks. None: weights are sent in the dtype they are computed with.

    Returns what was passed. Afterwards ``module``'s class is ``FSDP<its class>``, a subclass of it
    and of ``FSDPModule``; its parameters are ``nn.Parameter``s holding RaggedShard DTensors, views
    of one flat buffer per dtype. Values are taken from this rank's memory: all ranks must hold the
    same. Build optimizers after the call, and while no parameter is gathered: the step of one that
    holds replaced or gathered parameters is refused.

    Raises on every rank alike, and before anything is changed: TypeError, ValueError or
    NotImplementedError for arguments; RuntimeError without a process group, or if the ranks wrap
    different things. A rank whose arguments were right raises RuntimeError with what another one
    found, but for ``mesh`` and ``dp_mesh_dims``, over which ranks would tell each other.
    """
    leave_untraced(run_gathered, *param_group.HOOKS, *saved_tensors.HOOKS, *unit.HOOKS)
    modules = modules_in(module)
    mesh = check_mesh(mesh, modules)
    check_dims(dp_mesh_dims)
    data = data_mesh_of(mesh, dp_mesh_dims)
    device = device_of(mesh)
    found: list[list[Managed]] = []
    borrowed: list[ParamGroup] = []
    ignored: set[nn.Parameter] = set()
    reshard, error = None, None
    try:  # what only this rank may have wrong; the mesh is needed to tell the others
        modules = roots_of(module)
        check_reshard(reshard_after_forward)
        check_policy(mp_policy)
        check_offload(offload_policy)
        ignored = ignored_set(ignored_params)
        check_placement_fn(shard_placement_fn)
        check_lanes(lanes)
        check_gather_as(gather_as)
        if gather_as is not None and granularity is None:
            granularity = gather_as.granularity
        reshard = reshard_over(reshard_after_forward, data.shards)
        items, ties = collect(modules, ignored, granularity, shard_placement_fn, mp_policy, data)
        check_devices(items, names_of(modules), device)
        check_tiles(items, gather_as, offload_policy, device)
        found = split(items)
        for items in found:  # they may be on meshes of their own
            reshard_over(reshard_after_forward, items[0].data.shards)
    except Exception as caught:  # also what the caller's granularity function may raise
        error = caught  # agree() raises it, here and on the other ranks
    if reshard is None and data.shard_axis is None:
        reshard = False  # no other rank's memory to save it for
    own = own_params(modules, ignored)
    meshes = [data.groups, *(other.get_all_groups()[::-1] for other in parallel_meshes(own))]
    options: list[str] = []  # with an error they may be anything, and nobody compares them
    if error is None:
        options = describe_options(mp_policy, offload_policy, lanes=lanes, gather_as=gather_as)
    description = describe(modules, data, options, reshard, found)
    agree_everywhere(meshes, device, "wrap the module", description, error)
    others = dict.fromkeys(items[0].data for items in found if items[0].data != data)
    agree_everywhere([mesh.groups for mesh in others], device, "wrap the module", description)
    groups = [_group_of(items, device, offload_policy, lanes, gather_as) for items in found]
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
    wrapped.ignored = [weakref.ref(param) for param in ignored]
    for each in modules:
        each.__dict__[UNIT] = wrapped
        each.__class__ = _wrapped_class(type(each))
        if "forward" in each.__dict__:  # set on the instance, as torch.compile and others do
            register_fsdp_forward_method(each, "forward")
    note_wrap(groups)
    return module  # type: ignore[return-value]  # of that class by now


def _group_of(
    items: list[Managed],
    device: torch.device,
    offload: OffloadPolicy,
    lanes: int | Literal["auto"],
    gather_as: BlockScaled | None,
) -> ParamGroup:
    first: Any = items[0]
    if has_extension(first.original):
        return ExtensionGroup(items, first.data, device, first.policy, offload, lanes)
    dtype = first.original.dtype
    scaled = gather_as and any(gather_as.tiling(item.block, dtype) for item in items)
    form = gather_as if scaled else None
    return ParamGroup(items, first.data, device, first.policy, offload, lanes, form)


def _wrapped_class(cls: type) -> type:
    if cls not in _wrapped_classes:
        namespace = {"__module__": cls.__module__}
        _wrapped_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), namespace)
    return _wrapped_classes[cls]


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for _, submodule in unwrapped(modules):
        for name, buffer in submodule._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                submodule._buffers[name] = buffer.to(device)
