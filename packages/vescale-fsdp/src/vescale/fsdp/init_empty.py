# SPDX-License-Identifier: Apache-2.0
"""Give a model that was built on the meta device its memory and its first values."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor import random
from vescale.dtensor.state import fill
from vescale.dtensor.tensor import local_of
from vescale.fsdp.agreement import agree
from vescale.fsdp.arguments import check_bool
from vescale.fsdp.fqns import clean_fqn, groups_in
from vescale.fsdp.inference import ordinary_tensors
from vescale.fsdp.materialize import materialize
from vescale.fsdp.rng import one_random_stream
from vescale.fsdp.units import units_of

METHODS = ("reset_parameters", "_reset_parameters")  # the second one: torch's attention modules

Init = Callable[[str, nn.Module], object]


class InitReport(NamedTuple):
    """FQNs of what was on the meta device, in the order of modules; ties by their first name."""

    initialised: list[str]
    uninitialised: list[str]

    def __repr__(self) -> str:
        """Return the counts, and the first names of what nothing initialised."""
        lost = f": {_some(self.uninitialised)}" if self.uninitialised else ""
        return (
            f"InitReport({len(self.initialised)} initialised, "
            f"{len(self.uninitialised)} uninitialised{lost})"
        )


@ordinary_tensors
def init_empty(
    module: nn.Module,
    device: torch.device | str | None = None,
    *,
    init: Init | None = None,
    strict: bool = True,
) -> InitReport:
    """Allocate what is on the meta device, and let every module initialise its own tensors.

    Modules come in the order in which they are constructed: children first. For each that has
    tensors of its own on meta, ``init(fqn, module)`` is called, where given; if that wrote none
    of them, the module's ``reset_parameters()``. Both see whole plain tensors in the module
    itself, on every rank alike, and its shards are cut from them: a rank needs memory for one
    module's own parameters. All ranks draw from the generator of the first, so values are those
    of one process that builds the model on this device from the same seed, where the modules'
    constructors draw through ``reset_parameters``. A tied parameter is initialised by the first
    of its modules.

    Nothing can re-run what ``__init__`` computed, such as the ``inv_freq`` buffer of rotary
    embeddings, or an ``nn.Parameter`` of a module without ``reset_parameters``. What nobody wrote
    is filled with NaN (0 for integers) and named: in the RuntimeError that is raised, after
    everything else has been done, or with ``strict=False`` in the report.

    ``device`` is where plain tensors go; default, and for wrapped parameters in any case, the
    device of their mesh. Tensors that are on a real device are left alone. Collective over the
    meshes of the parameters. Raises TypeError and ValueError for arguments; what ``init`` raises
    on one rank is an error on all.
    """
    _check(module, init)
    check_bool("strict", strict)
    device = _resolve(module, device)
    for unit in units_of(module, recurse=True):
        unit.reshard()
    slots = _Slots(module)
    materialize(module, device)
    slots.allocated()
    error: Exception | None = None
    mesh = _widest_mesh(module)
    one_device = random.use_mode("device")  # for DTensors below a module that resets them all
    with one_random_stream(mesh, device), one_device, torch.no_grad(), torch.device(device):
        try:
            for fqn, submodule in _children_first(module):
                _initialise(fqn, submodule, slots, init)
        except Exception as caught:
            error = caught  # raised below, here and on the other ranks
    lost = slots.poison()
    report = InitReport([name for name in slots.names() if name not in lost], lost)
    _agree_over(mesh, device, "\n".join(lost), error)
    if lost and strict:
        raise RuntimeError(_complaint(lost))
    return report


@dataclass(eq=False)
class _Fresh:
    """A tensor that was on meta."""

    name: str
    tensor: torch.Tensor
    done: bool = False

    def stamp(self) -> tuple[int, ...]:
        """Return what changes when somebody writes the tensor."""
        if isinstance(self.tensor, DTensor):
            return self.tensor._version, local_of(self.tensor)._version
        return (self.tensor._version,)


class _Slots:
    """Where tensors on the meta device are registered, and what became of them."""

    def __init__(self, module: nn.Module) -> None:
        self._slots: dict[int, list[tuple[dict, str, str]]] = {}
        self._fresh: dict[int, _Fresh] = {}
        self._modules = list(module.modules())  # so that their ids stay theirs
        for fqn, submodule in module.named_modules():
            for registry in (submodule._parameters, submodule._buffers):
                for name, tensor in registry.items():
                    if tensor is not None and tensor.is_meta:
                        full = clean_fqn(f"{fqn}.{name}" if fqn else name)
                        self._slots.setdefault(id(submodule), []).append((registry, name, full))

    def allocated(self) -> None:
        """Note the tensors that took the place of those on meta, and mark their memory."""
        for registry, name, full in (slot for slots in self._slots.values() for slot in slots):
            tensor = registry[name]
            if id(tensor) not in self._fresh:
                _mark(tensor)
                self._fresh[id(tensor)] = _Fresh(full, tensor, done=tensor.numel() == 0)

    def names(self) -> list[str]:
        return [fresh.name for fresh in self._fresh.values()]

    def of(self, module: nn.Module) -> list[tuple[dict, str, _Fresh]]:
        """Return (registry, name, tensor) of what the module itself has."""
        mine = self._slots.get(id(module), ())
        return [(registry, name, self._fresh[id(registry[name])]) for registry, name, _ in mine]

    def under(self, module: nn.Module) -> list[_Fresh]:
        """Return what the module and those under it have."""
        tensors = (*module.parameters(), *module.buffers())
        return [self._fresh[id(tensor)] for tensor in tensors if id(tensor) in self._fresh]

    def all_fresh(self, module: nn.Module, recurse: bool) -> bool:
        """Tell whether every parameter was on meta, so that a reset destroys nothing."""
        return all(id(param) in self._fresh for param in module.parameters(recurse))

    def replace(self, fresh: _Fresh, tensor: torch.Tensor) -> None:
        """Note that another tensor was registered in place of this one."""
        self._fresh[id(tensor)] = fresh
        fresh.tensor = tensor

    def poison(self) -> list[str]:
        """Fill what nobody initialised, and return its names."""
        lost = {id(fresh): fresh for fresh in self._fresh.values() if not fresh.done}
        for fresh in lost.values():
            _mark(fresh.tensor)
        return [fresh.name for fresh in lost.values()]


def _initialise(fqn: str, module: nn.Module, slots: _Slots, init: Init | None) -> None:
    """Let ``init`` or the module's own method write the tensors under ``module``."""
    method, mine = _method(module), slots.of(module)
    below = [(fresh, fresh.stamp()) for fresh in slots.under(module) if not fresh.done]
    if not mine and not (method and slots.under(module)):
        return
    written = bool(mine and init and _run(functools.partial(init, fqn, module), mine, slots))
    if method and not written and slots.all_fresh(module, recurse=not mine):
        _run(method, mine, slots)
    for fresh, stamp in below:
        fresh.done = fresh.done or fresh.stamp() != stamp


def _run(call: Callable[[], object], mine: list[tuple[dict, str, _Fresh]], slots: _Slots) -> bool:
    """Call with whole tensors in the module, keep what was written; tell whether any was."""
    stand_ins: dict[int, torch.Tensor] = {}
    for registry, name, fresh in mine:
        if id(fresh) not in stand_ins:
            # One that another module initialised stays as it is: the call gets a spare one.
            itself = not fresh.done and not isinstance(fresh.tensor, DTensor)
            stand_ins[id(fresh)] = fresh.tensor if itself else _whole(fresh.tensor)
        registry[name] = stand_ins[id(fresh)]
    versions = {key: tensor._version for key, tensor in stand_ins.items()}
    try:
        call()
        left = [registry.get(name) for registry, name, _ in mine]
    finally:
        for registry, name, fresh in mine:
            registry[name] = fresh.tensor
    written = set()
    for (registry, name, fresh), found in zip(mine, left, strict=True):
        if fresh.done or found is None or found.is_meta:
            continue
        untouched = found is stand_ins[id(fresh)] and found._version == versions[id(fresh)]
        if untouched and _is_marked(found):
            continue
        written.add(fresh)
        if found is not fresh.tensor:
            _keep(registry, name, fresh, found, slots)
    for fresh in written:
        fresh.done = True
    return bool(written)


def _keep(registry: dict, name: str, fresh: _Fresh, found: torch.Tensor, slots: _Slots) -> None:
    if not isinstance(fresh.tensor, nn.Parameter):  # a buffer was assigned, perhaps of other shape
        registry[name] = found.to(fresh.tensor.device)
        slots.replace(fresh, registry[name])
        return
    if found.shape != fresh.tensor.shape:
        raise ValueError(
            f"{fresh.name} was initialised with shape {tuple(found.shape)}, but was built and "
            f"sharded with {tuple(fresh.tensor.shape)}; keep its shape."
        )
    fill(fresh.tensor, found.detach())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor [tensor.shape] to initialise in its place."""
    # On the device in force, which is not that of the shards where these are offloaded.
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    _mark(whole)
    if isinstance(tensor, nn.Parameter):
        whole = nn.Parameter(whole, requires_grad=tensor.requires_grad)
    vars(whole).update(vars(tensor))
    return whole


def _mark(tensor: torch.Tensor) -> None:
    """Fill with what no initialisation leaves."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        floating = local.is_floating_point() or local.is_complex()
        local.detach().fill_(float("nan") if floating else 0)


def _is_marked(tensor: torch.Tensor) -> bool:
    """Tell whether the mark is still there, where it can be told from a value."""
    floating = tensor.is_floating_point() or tensor.is_complex()
    return not floating or bool(tensor.isnan().all())


def _method(module: nn.Module) -> Callable[[], object] | None:
    for name in METHODS:
        # Of the class: a wrapper hands attributes of the module inside of it on.
        if callable(getattr(type(module), name, None)):
            method = getattr(module, name)
            parameters = inspect.signature(method).parameters.values()
            if all(p.default is not p.empty or p.kind in _VARIADIC for p in parameters):
                return method
    return None


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _children_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()

    def walk(fqn: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, child in module.named_children():
            yield from walk(f"{fqn}.{name}" if fqn else name, child)
        yield clean_fqn(fqn), module

    yield from walk("", module)


def _check(module: nn.Module, init: Init | None) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}, expected an nn.Module.")
    if init is not None and not callable(init):
        raise TypeError(
            f"init is a {type(init).__name__}, expected a function (fqn, module) that initialises "
            "the module's own tensors in place."
        )


def _resolve(module: nn.Module, device: torch.device | str | None) -> torch.device:
    homes = [group.device for group in groups_in(module)]
    if device is None:
        if not homes:
            raise ValueError("no parameter is wrapped, so say on which device: device='cuda'.")
        return homes[0]
    try:
        device = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"device={device!r} names no device, expected one such as 'cuda'."
        ) from error
    if device.type == "meta":
        raise ValueError("device is meta, where tensors have no values; name a real device.")
    for home in homes:
        if home.type != device.type:
            raise ValueError(f"device is {device}, but the model is wrapped for a mesh on {home}.")
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    for home in homes:
        if home != device:
            raise ValueError(f"device is {device}, but the model is wrapped for a mesh on {home}.")
    return device


def _widest_mesh(module: nn.Module) -> DeviceMesh | None:
    meshes = [p.device_mesh for p in module.parameters() if isinstance(p, DTensor)]
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def _agree_over(
    mesh: DeviceMesh | None, device: torch.device, lost: str, error: Exception | None
) -> None:
    """Raise on all ranks of the mesh what one of them found."""
    groups = mesh.get_all_groups() if mesh is not None and mesh.get_coordinate() else []
    for group in groups:
        try:
            agree(group, device, "initialise the model", lost, error)
        except Exception as caught:
            error = caught  # the other axes are told too
    if error is not None:
        raise error


def _complaint(names: list[str]) -> str:
    return (
        f"nothing initialised {_some(names)}: their modules have no "
        "reset_parameters() that writes them, and what __init__ computed is not run again. They "
        "are NaN now (0 for integers), everything else is initialised. Pass init=function(fqn, "
        "module) that writes them, load them from a checkpoint, or pass strict=False and write "
        "them yourself."
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
