# SPDX-License-Identifier: Apache-2.0
"""Load whole tensors into a model, however it is sharded, one tensor at a time."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from vescale.dtensor.state import match_full_state
from vescale.fsdp.agreement import agree
from vescale.fsdp.fqns import clean_fqn, groups_in
from vescale.fsdp.materialize import materialize, meta_names
from vescale.fsdp.units import units_of

EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state() returns


class LoadedKeys(NamedTuple):
    """What did not match, as ``nn.Module.load_state_dict`` returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    from_rank0: bool = True,
    strict: bool = True,
) -> LoadedKeys:
    """Copy whole tensors into ``model``'s parameters and buffers, in place.

    With ``from_rank0`` only global rank 0 needs ``state_dict``, and tensors are broadcast one by
    one; else every rank passes its own, and none travels. Beside its shards a rank needs memory
    for the largest tensor. ``model`` is wrapped or not, on the meta device or not.

    - Keys are those of ``model.state_dict()`` before wrapping. The names that ``torch.compile``,
      ``checkpoint_wrapper`` and DDP (``module.``) add are ignored.
    - A tied parameter is found under any of its names. Given under several, all must be equal.
    - Buffers are loaded too. Those with ``persistent=False`` may be missing, and then stay.
    - Values take the dtype of their targets; a float never becomes an integer.

    With ``strict=False`` keys may be missing or unknown; both are returned. Hooks that rename
    keys while a state dict is loaded do not run.

    Collective over the default process group. Raises on all ranks alike, before anything is
    changed: ValueError for keys and shapes that do not match, which it names, and for tensors on
    the meta device that the state does not have; TypeError or ValueError for a state that is no
    dict or gives a tie two values (RuntimeError with that message on ranks that cannot see it).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module.")
    _check_group()
    for unit in units_of(model, recurse=True):
        unit.reshard()
    device = _device(model)
    names, given, error = _Names(model), {}, None
    try:
        if not from_rank0 or dist.get_rank() == 0:
            given = names.translate(state_dict)
    except Exception as caught:
        error = caught  # agree() raises it, here and on the other ranks
    _agree(device, "\n".join(names.targets()), error)
    src = 0 if from_rank0 else None
    state = match_full_state(
        names.targets(), given, src=src, strict=strict, optional=names.optional, allow_meta=True
    )
    absent = {name for key in state.absent for name in names.tied_to(key)}
    lost = [name for name in meta_names(model) if name in absent]
    _agree(device, "", _left_on_meta(lost) if lost else None)
    materialize(model, device)
    targets = _Names(model).targets()
    with torch.no_grad():
        state.copy_into(targets)
    _set_extra_states(model, targets, absent)
    return LoadedKeys(state.missing, state.unexpected)


class _Names:
    """The keys of a model's state; a tensor with several names goes by its first."""

    def __init__(self, model: nn.Module) -> None:
        self._state = {clean_fqn(key): value for key, value in model.state_dict().items()}
        tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self._tied: dict[int, list[str]] = {}
        self._first: dict[str, str] = {}
        self.optional: set[str] = set()
        for fqn, tensor in tensors.items():
            name = clean_fqn(fqn)
            same = self._tied.setdefault(id(tensor), [])
            same.append(name)
            self._first[name] = same[0]
            if name not in self._state:
                self._state[name] = tensor
                self.optional.add(name)
        self._kept = list(tensors.values())  # so that their ids stay theirs

    def targets(self) -> dict[str, Any]:
        """Return what is to be filled, each tensor once."""
        return {
            key: value if isinstance(value, torch.Tensor) else _Value(value)
            for key, value in self._state.items()
            if self._first.get(key, key) == key
        }

    def tied_to(self, key: str) -> list[str]:
        """Return all names of the tensor whose first name is ``key``."""
        return [name for name, first in self._first.items() if first == key] or [key]

    def translate(self, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the caller's state under the names of ``targets``."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict is a {type(state_dict).__name__}, expected a dict of whole tensors; "
                "with from_rank0=True rank 0 must have it, else every rank."
            )
        cleaned = self._without_prefix({clean_fqn(key): key for key in state_dict})
        found: dict[str, tuple[str, Any]] = {}
        for name, key in cleaned.items():
            first, value = self._first.get(name, name), state_dict[key]
            value = value if isinstance(value, torch.Tensor) else _Value(value)
            if first in found and not _equal(found[first][1], value):
                raise ValueError(
                    f"{found[first][0]} and {key} are one parameter of this model, but differ in "
                    "the state; leave one of them out, or untie them in the model."
                )
            found.setdefault(first, (key, value))
        return {name: value for name, (_, value) in found.items()}

    def _without_prefix(self, keys: dict[str, str]) -> dict[str, str]:
        """Take DDP's ``module.`` off, if every key has it and the model has no such module."""
        prefix = "module."
        ours = any(name.startswith(prefix) for name in self._state)
        if ours or not all(name.startswith(prefix) for name in keys):
            return keys
        return {name.removeprefix(prefix): key for name, key in keys.items()}


class _Value:
    """Something that is no tensor: travels as it is, and is not looked into."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return one.shape == other.shape and torch.equal(one.to(other.device), other)


def _set_extra_states(model: nn.Module, targets: dict[str, Any], absent: set[str]) -> None:
    for fqn, module in model.named_modules():
        key = clean_fqn(f"{fqn}.{EXTRA_STATE}" if fqn else EXTRA_STATE)
        if key in targets and key not in absent:
            value = targets[key]
            module.set_extra_state(value.value if isinstance(value, _Value) else value)


def _check_group() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "load_full_state_dict needs a process group and there is none; for one process use "
            "model.load_state_dict(), or call torch.distributed.init_process_group() first."
        )


def _device(model: nn.Module) -> torch.device:
    """Return where tensors travel, and where plain ones on meta go."""
    for group in groups_in(model):
        return group.device
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")


def _agree(device: torch.device, description: str, error: Exception | None) -> None:
    agree(dist.group.WORLD, device, "load the full state", description, error)


def _left_on_meta(names: list[str]) -> ValueError:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ValueError(
        f"the state has no values for {', '.join(names[:10])}{more}, which are on the meta device; "
        "call vescale.fsdp.init_empty(model, device) first, or add them to the state (a buffer "
        "with persistent=False is no part of state_dict(), but is loaded if it is there)."
    )
