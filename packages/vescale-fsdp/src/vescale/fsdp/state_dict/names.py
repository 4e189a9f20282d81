# SPDX-License-Identifier: Apache-2.0
"""The keys of a model's state, and which tensor each of them names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vescale.fsdp.fqns import clean_fqn

EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state() returns
PREFIX = "module."  # what DistributedDataParallel puts before every key


class StateNames:
    """The keys of a model's state; a tensor with several names goes by its first.

    Keys are those of the model before ``torch.compile``, activation checkpointing and DDP wrapped
    it. Buffers with ``persistent=False`` are among them, as ``optional`` ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._inside = PREFIX if isinstance(model, DistributedDataParallel) else ""
        tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self._kept = list(tensors.values())  # so that their ids stay theirs
        state = model.state_dict(keep_vars=True)
        self._state = {self.clean(key): value for key, value in state.items()}
        self._tied: dict[int, list[str]] = {}
        self._first: dict[str, str] = {}
        self.optional: set[str] = set()
        for fqn, tensor in tensors.items():
            name = self.clean(fqn)
            same = self._tied.setdefault(id(tensor), [])
            same.append(name)
            self._first[name] = same[0]
            if name not in self._state:
                self._state[name] = tensor
                self.optional.add(name)

    def clean(self, fqn: str) -> str:
        """Return ``fqn`` without what wrappers have added to it."""
        return clean_fqn(fqn.removeprefix(self._inside))

    def targets(self) -> dict[str, Any]:
        """Return what is to be filled, each tensor once."""
        return {
            key: value if isinstance(value, torch.Tensor) else Value(value)
            for key, value in self._state.items()
            if self._first.get(key, key) == key
        }

    def first(self, name: str) -> str:
        """Return the first name of the tensor that is called ``name``, or ``name`` itself."""
        return self._first.get(name, name)

    def tied_to(self, key: str) -> list[str]:
        """Return all names of the tensor whose first name is ``key``."""
        return [name for name, first in self._first.items() if first == key] or [key]

    def translate(self, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the caller's state under the names of ``targets``.

        Raises TypeError for what is no mapping, ValueError where one tensor has two values.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict is a {type(state_dict).__name__}, expected a dict of tensors; "
                "where rank 0 broadcasts it must have it, else every rank."
            )
        cleaned = self._without_prefix({self.clean(key): key for key in state_dict})
        found: dict[str, tuple[str, Any]] = {}
        for name, key in cleaned.items():
            first, value = self.first(name), state_dict[key]
            value = value if isinstance(value, torch.Tensor) else Value(value)
            if first in found and not _equal(found[first][1], value):
                raise ValueError(
                    f"{found[first][0]} and {key} are one parameter of this model, but differ in "
                    "the state; leave one of them out, or untie them in the model."
                )
            found.setdefault(first, (key, value))
        return {name: value for name, (_, value) in found.items()}

    def _without_prefix(self, keys: dict[str, str]) -> dict[str, str]:
        """Take DDP's prefix off, if every key has it and the model has no such module."""
        ours = any(name.startswith(PREFIX) for name in self._state)
        if ours or not all(name.startswith(PREFIX) for name in keys):
            return keys
        return {name.removeprefix(PREFIX): key for name, key in keys.items()}

    def check_loadable(self) -> None:
        """Raise ValueError where filling ``targets`` would not fill the model."""
        known = {id(tensor) for tensor in self._kept}
        for key, value in self._state.items():
            made = isinstance(value, torch.Tensor) and id(value) not in known
            if made and key.rpartition(".")[2] != EXTRA_STATE:
                raise ValueError(
                    f"{key} in the model's state_dict() is no parameter or buffer of it but made "
                    "by a hook, so loading into it would not reach the model; remove the hook, or "
                    "use model.load_state_dict()."
                )


class Value:
    """Something that is no tensor: travels as it is, and is not looked into."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if hasattr(one, "to_local") or hasattr(other, "to_local"):
        return _same_part(one, other)
    return one.shape == other.shape and torch.equal(one.to(other.device), other)


def _same_part(one: Any, other: Any) -> bool:
    """Compare this rank's parts: ranks that find a difference tell the others."""
    if not (hasattr(one, "to_local") and hasattr(other, "to_local")):
        return False
    if one.shape != other.shape or one.placements != other.placements:
        return False
    return torch.equal(one.to_local(), other.to_local())
