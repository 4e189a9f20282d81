# SPDX-License-Identifier: Apache-2.0
"""Place a model's parameters as a plan says, and hook the moves of its activations in."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from vescale.dtensor import random
from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.factory import distribute_tensor
from vescale.dtensor.plan.gradients import GradientPlacements
from vescale.dtensor.plan.rules import (
    Argument,
    ByAxis,
    Matches,
    Plan,
    clean,
    match,
    placements_on,
)
from vescale.dtensor.spec import ragged_axis


def parallelize(
    module: nn.Module, mesh: DeviceMesh, plan: Plan, *, src_data_rank: int | None = 0
) -> nn.Module:
    """Parallelise ``module`` in place as ``plan`` says, and return it. Its code stays as it is.

    Every parameter becomes a DTensor on ``mesh`` with the values of ``src_data_rank``, a rank of
    each axis, or with ``None`` of each rank, which must then be equal; on the meta device they stay
    there. Ties stay. Hooks move activations at the boundaries that the plan names. Gradients get
    the placements of their parameters: those that are sums of several ranks are reduced at the end
    of backward, many in one collective. Random operators on DTensors draw as one device from here
    on, unless ``random.set_mode`` said otherwise; seed all ranks alike.

    Data parallelism is left to ``fully_shard``, on another axis, afterwards. Collective. Raises
    TypeError and ValueError for what does not fit, before anything is changed.
    """
    _check(module, mesh, plan)
    names = mesh.mesh_dim_names or (("",) if mesh.ndim == 1 else ())
    if not names:
        raise ValueError(f"the axes of {mesh} have no names; make it with mesh_dim_names=.")
    found = match(plan, module, tuple(names))
    placements = _parameter_placements(module, found, mesh)
    slots = [
        (owner, name, param)
        for owner in module.modules()
        for name, param in owner._parameters.items()
        if param is not None
    ]
    made: dict[int, nn.Parameter] = {}
    gradients = GradientPlacements()
    for owner, name, param in slots:
        if id(param) not in made:
            fqn, wanted = placements[id(param)]
            made[id(param)] = _distribute(param, mesh, wanted, src_data_rank)
            left = {axis: placed.placement for axis, placed in found.grads.get(fqn, {}).items()}
            gradients.watch(
                made[id(param)], tuple(left.get(axis, own) for axis, own in enumerate(wanted))
            )
        owner._parameters[name] = made[id(param)]
    for fqn, owner in module.named_modules(remove_duplicate=False):
        arguments, output = found.inputs.get(clean(fqn)), found.outputs.get(clean(fqn))
        if arguments:
            owner.register_forward_pre_hook(_place_inputs(owner, arguments, mesh), with_kwargs=True)
        if output:
            owner.register_forward_hook(_place_output(output, mesh))
    random.turn_on()
    return module


def _check(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    for value, kind, name in ((module, nn.Module, "module"), (mesh, DeviceMesh, "mesh")):
        if not isinstance(value, kind):
            raise TypeError(
                f"parallelize got {name}={value!r}, expected a {kind.__name__}; the order is "
                "parallelize(module, mesh, plan)."
            )
    if not isinstance(plan, Plan):
        raise TypeError(
            f"parallelize got plan={plan!r}, expected a Plan; see vescale.dtensor.plan."
        )
    for fqn, param in module.named_parameters():
        if isinstance(param, TorchDTensor):
            raise ValueError(
                f"{fqn} is a DTensor of {param.placements} already; parallelize a model once, and "
                "before fully_shard."
            )


def _parameter_placements(
    module: nn.Module, found: Matches, mesh: DeviceMesh
) -> dict[int, tuple[str, tuple[Placement, ...]]]:
    """Return (name, placements) by the id of the parameter; the names of a tie must agree."""
    placements: dict[int, tuple[str, tuple[Placement, ...]]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        fqn = clean(name)
        ruled = found.params.get(fqn, {})
        wanted = placements_on(ruled, mesh.ndim)
        for placed in ruled.values():
            dim = getattr(placed.placement, "dim", 0)
            if placed.placement.is_shard() and not -param.ndim <= dim < param.ndim:
                raise ValueError(
                    f"{placed.rule}: {fqn} has shape {tuple(param.shape)}, so no dim {dim} to "
                    "shard; choose one that it has."
                )
        first, before = placements.setdefault(id(param), (fqn, wanted))
        if before != wanted:
            raise ValueError(
                f"{first} and {fqn} are one parameter, but the plan places them as {before} and "
                f"{wanted}; give both names the same rule."
            )
    return placements


def _distribute(
    param: nn.Parameter,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    src_data_rank: int | None,
) -> nn.Parameter:
    # torch's own class computes faster; ours knows ragged placements.
    place = torch_distribute_tensor if ragged_axis(placements) is None else distribute_tensor
    placed = place(param.detach(), mesh, placements, src_data_rank=src_data_rank)
    fresh = nn.Parameter(placed, requires_grad=param.requires_grad)
    vars(fresh).update(vars(param))
    return fresh


def _place_inputs(
    module: nn.Module, arguments: Mapping[Argument, ByAxis], mesh: DeviceMesh
) -> Callable[..., Any]:
    order = list(inspect.signature(module.forward).parameters)

    def hook(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given, kwargs = list(args), dict(kwargs)
        for argument, ruled in arguments.items():
            index = order.index(argument) if argument in order else argument
            if argument in kwargs:
                kwargs[argument] = _move(kwargs[argument], ruled, mesh)
            elif isinstance(index, int) and index < len(given):
                given[index] = _move(given[index], ruled, mesh)
        return tuple(given), kwargs

    return hook


def _place_output(ruled: ByAxis, mesh: DeviceMesh) -> Callable[..., Any]:
    local = any(placed.rule.local for placed in ruled.values())

    def hook(_: nn.Module, args: tuple, output: Any) -> Any:
        return _move(output, ruled, mesh, local)

    return hook


def _move(x: Any, ruled: ByAxis, mesh: DeviceMesh, local: bool = False) -> Any:
    if type(x) in (tuple, list):
        return type(x)(_move(item, ruled, mesh, local) for item in x)
    if not isinstance(x, torch.Tensor):
        return x
    if not isinstance(x, TorchDTensor):
        placements = placements_on(ruled, mesh.ndim)
        return x if local else TorchDTensor.from_local(x, mesh, placements, run_check=False)
    if x.device_mesh != mesh:
        rule = next(iter(ruled.values())).rule
        raise ValueError(
            f"{rule} got a DTensor on {x.device_mesh}, but the model is parallelised on {mesh}; "
            "pass one on that mesh, or a plain tensor."
        )
    placements = tuple(
        _front(ruled[axis].placement, x.ndim) if axis in ruled else own
        for axis, own in enumerate(x.placements)
    )
    summed = any(placement.is_partial() for placement in x.placements)
    x = x.redistribute(placements=placements)  # also where nothing moves: the gradient comes so
    if (
        summed
    ):  # torch cannot move a gradient that is a sum to some kinds of sums, but to a placement
        x = x.redistribute(placements=placements)
    return x.to_local() if local else x


def _front(placement: Placement, ndim: int) -> Placement:
    """Return ``placement`` with a dim counted from the front."""
    dim = getattr(placement, "dim", 0)
    kind: Callable[[int], Placement] = type(placement)
    return kind(dim + ndim) if placement.is_shard() and dim < 0 else placement
