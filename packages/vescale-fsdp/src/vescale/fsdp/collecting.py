# SPDX-License-Identifier: Apache-2.0
"""What one call of ``fully_shard`` finds to manage: parameters, ties, and how they group."""

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor import is_ragged_shard
from vescale.dtensor.tensor import local_of
from vescale.fsdp.agreement import FIELDS
from vescale.fsdp.block_scaled import BlockScaled
from vescale.fsdp.data_mesh import DataMesh
from vescale.fsdp.extension import check_rows, has_extension
from vescale.fsdp.granularity import Granularity, resolve_granularity
from vescale.fsdp.managed import OWNER_ATTRIBUTE, Managed
from vescale.fsdp.module import FSDPModule
from vescale.fsdp.offload import offloads
from vescale.fsdp.parallel import parallel_of
from vescale.fsdp.param_group import ParamGroup
from vescale.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy, policy_for
from vescale.fsdp.shard_placement import PlacementFn, data_mesh_for
from vescale.fsdp.wrap_arguments import names_of


def collect(
    modules: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    granularity: Granularity | Callable[[str, nn.Parameter], Granularity] | None,
    placement_fn: PlacementFn | None,
    policy: MixedPrecisionPolicy,
    data: DataMesh,
) -> tuple[list[Managed], dict[tuple[ParamGroup, int], list]]:
    """Return the parameters that the unit will manage, and its ties to other units'."""
    found: dict[int, Managed] = {}
    ties: dict[tuple[ParamGroup, int], list] = {}
    ignored_ids = {id(param) for param in ignored}
    whole_meshes: dict[tuple[DeviceMesh, DeviceMesh], DeviceMesh] = {}
    for prefix, submodule in unwrapped(modules):
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
                policy_here = policy_for(policy, fqn, param)
                found[id(param)] = Managed(
                    fqn, [slot], param, chosen, own, parallel, policy=policy_here
                )
    return list(found.values()), ties


def unwrapped(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
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


def own_params(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[nn.Parameter]:
    ignored_ids = {id(param) for param in ignored}
    return [
        param
        for _, submodule in unwrapped(modules)
        for param in submodule._parameters.values()
        if param is not None
        and id(param) not in ignored_ids
        and not any(is_ragged_shard(p) for p in getattr(param, "placements", ()))
    ]


def _check_param(fqn: str, param: nn.Parameter) -> None:
    lazy = nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]  # not in the stub
    if isinstance(param, lazy):
        raise ValueError(f"{fqn} is not initialised; run one forward of the lazy module first.")
    if any(is_ragged_shard(p) for p in getattr(param, "placements", ())):
        raise ValueError(
            f"{fqn} is sharded by fully_shard already, as part of another module; wrap from the "
            "inside out, and tie parameters before the first call."
        )
    local = local_of(param) if isinstance(param, DTensor) else param
    if has_extension(param):
        return
    if local.layout is not torch.strided or local.is_quantized:
        raise NotImplementedError(
            f"{fqn} is no dense tensor ({local.layout}, {local.dtype}), expected a strided one of "
            "plain numbers; make it dense (.to_dense(), .dequantize()) before fully_shard, or pass "
            "it in ignored_params to leave it as it is."
        )
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


def check_devices(items: list[Managed], name: str, device: torch.device) -> None:
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


def check_tiles(
    items: list[Managed],
    gather_as: BlockScaled | None,
    offload: OffloadPolicy,
    device: torch.device,
) -> None:
    """Raise unless every tile that gets a scale of its own stays on one rank."""
    if gather_as is None:
        return
    if offloads(offload) and device.type != "cpu":
        raise NotImplementedError(
            "gather_as finds scales where shards are computed with, and CPUOffloadPolicy keeps "
            "them on the host; use one of the two."
        )
    for item in items:
        if has_extension(item.original):
            continue
        tiling = gather_as.tiling(item.block, item.original.dtype)
        if tiling is None:
            continue
        block = item.granularity.block_numel(item.block, fqn=item.fqn)
        if block % tiling.band_numel and block < item.block.numel():
            raise ValueError(
                f"{item.fqn}: {item.granularity} cuts tiles of {gather_as}; leave granularity "
                f"out, or use {tiling.granularity} or a multiple of it, or Whole()."
            )


def split(items: list[Managed]) -> list[list[Managed]]:
    """Split into groups, in order of appearance: one needs one mesh, dtype and requires_grad.

    Uneven tensor-parallel parameters are laid out by each of their ranks in its own way. What else
    is in the unit must be cut alike by all, since a checkpoint holds it once.
    """
    groups: dict[tuple, list[Managed]] = {}
    for item in items:
        param = item.original
        key: tuple = (item.data, param.dtype, item.policy, param.requires_grad, item.uneven)
        if has_extension(param):  # each has a gather of its own
            key = (id(item),)
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def describe(
    modules: Sequence[nn.Module],
    data: DataMesh,
    options: Sequence[str],
    reshard: bool | int | None,
    groups: list[list[Managed]],
) -> str:
    """Return a text that is equal on two ranks exactly if they wrap alike; a line a parameter.

    Fields of a line are divided as ``agree`` wants them.
    """
    wrapped = f"{names_of(modules)} over {data.replicas} x {data.shards} ranks"
    lines = [FIELDS.join([wrapped, *options, f"reshard_after_forward={reshard}"])]
    for items in groups:
        for item in items:
            p = item.original
            fields = (
                f"{item.fqn}",
                f"shape={tuple(p.shape)}",
                f"dtype={p.dtype}",
                f"requires_grad={p.requires_grad}",
                f"granularity={item.granularity}",
                f"param_dtype={item.policy.param_dtype}",
                *_describe_mesh(item, data),
            )
            lines.append(FIELDS.join(fields))
    return "\n".join(lines)


def _describe_mesh(item: Managed, data: DataMesh) -> Iterator[str]:
    if item.parallel is not None:
        yield f"{item.parallel.placements} on {item.parallel.mesh.mesh_dim_names}"
    if item.data != data:
        own = item.data
        yield f"over {own.replicas} x {own.shards} ranks of {own.mesh.mesh_dim_names}"
