# SPDX-License-Identifier: Apache-2.0
"""Optimizers of one model, their states under the names of its parameters.

The form is that of torch's ``get_optimizer_state_dict``: ``{"state": {fqn: {...}}, "param_groups":
[{"params": [fqn, ...], ...}]}``, of all optimizers in one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from vescale.fsdp.fqns import sharded_parameters
from vescale.fsdp.state_dict.first_state import drop_state, make_first_state
from vescale.fsdp.state_dict.names import StateNames

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def several(optimizers: Optimizer | Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    """Return one optimizer or several as a tuple; raise TypeError for anything else."""
    listed = isinstance(optimizers, Iterable)
    found = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizers {'has' if listed else 'is'} a {type(optimizer).__name__}, expected an "
                "optimizer of torch.optim's kind, or several."
            )
    return found


class NamedOptimizers:
    """The optimizers of ``model``, with the FQN of each of their parameters.

    Raises ValueError for a parameter that is none of the model's, or that two of them have.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> None:
        self.optimizers = several(optimizers)
        self.names = StateNames(model)
        params = sharded_parameters(model)
        self._params = [*params.values()]  # so that their ids stay theirs
        self._fqns = {id(param): self.names.clean(fqn) for fqn, param in params.items()}
        self.all_fqns = set(self._fqns.values())
        seen: dict[int, Optimizer] = {}
        for optimizer in self.optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for param in group[PARAMS]:
                    other = seen.setdefault(id(param), optimizer)
                    if other is not optimizer:
                        raise ValueError(
                            f"{self._fqns.get(id(param))} is in two optimizers, "
                            f"{type(other).__name__} and {type(optimizer).__name__}, and a state "
                            "has one entry for each name; save and load these one by one."
                        )
                    if id(param) not in self._fqns:
                        raise ValueError(
                            f"group {index} of {type(optimizer).__name__} holds a parameter "
                            f"{list(param.shape)} that is none of the model's; pass the whole "
                            "model, and build the optimizer from its parameters after fully_shard."
                        )

    def fqns(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        return [[self._fqns[id(p)] for p in group[PARAMS]] for group in optimizer.param_groups]

    def own_fqns(self) -> set[str]:
        """Return the names of all parameters that the optimizers hold."""
        return {fqn for o in self.optimizers for group in self.fqns(o) for fqn in group}

    def trainable(self) -> set[str]:
        """Return the names of all parameters that are to be trained."""
        return {
            self._fqns[id(param)]
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for param in group[PARAMS]
            if param.requires_grad
        }

    def held(self) -> dict[str, Any]:
        """Return the state that each parameter has now, which may be none."""
        return {
            self._fqns[id(param)]: optimizer.state.get(param)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for param in group[PARAMS]
        }

    def check(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise ValueError where ``groups`` have two values for what is one option here."""
        for optimizer in self.optimizers:
            for fqns in self.fqns(optimizer):
                group_options(fqns, groups)

    def state(self, *, keep: bool = False) -> dict[str, Any]:
        """Return the states of all; its tensors are the optimizers' own.

        Parameters without state have that of step 0 in it, which with ``keep`` their optimizer
        holds from then on. Collective where a step of theirs is.
        """
        named: dict[str, Any] = {STATE: {}, GROUPS: []}
        for optimizer in self.optimizers:
            bare = make_first_state(optimizer)
            packed = optimizer.state_dict()
            if not keep:
                drop_state(optimizer, bare)
            groups = self.fqns(optimizer)
            flat = [fqn for group in groups for fqn in group]
            for index, state in packed[STATE].items():
                if state:
                    named[STATE][flat[index]] = dict(state)
            for fqns, group in zip(groups, packed[GROUPS], strict=True):
                named[GROUPS].append({**group, PARAMS: fqns})
        return named

    def load(self, state: Mapping[str, Any]) -> None:
        """Hand each optimizer its part of ``state``, which has the names of ``state()``.

        Parameters that are not in it have no state afterwards. Groups without parameters, and
        those that ``state`` does not have, keep their options.
        """
        for optimizer in self.optimizers:
            groups = self.fqns(optimizer)
            flat = [fqn for group in groups for fqn in group]
            packed = optimizer.state_dict()[GROUPS]
            for fqns, group in zip(groups, packed, strict=True):
                group.update(group_options(fqns, state[GROUPS]))
            states = {i: state[STATE][fqn] for i, fqn in enumerate(flat) if fqn in state[STATE]}
            optimizer.load_state_dict({STATE: states, GROUPS: packed})


def group_options(fqns: Sequence[str], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options that ``groups`` have for the parameters of one group.

    Raises ValueError, naming parameters and option, where they have two values.
    """
    found: dict[str, tuple[Any, str]] = {}
    wanted = set(fqns)
    for group in groups:
        mine = [fqn for fqn in group[PARAMS] if fqn in wanted]
        for option, value in group.items() if mine else ():
            if option == PARAMS:
                continue
            before, fqn = found.setdefault(option, (value, mine[0]))
            if not _same(before, value):
                raise ValueError(
                    f"{option} is {before} for {fqn} and {value} for {mine[0]} in the state, but "
                    "they are in one group of this optimizer; group them as they were saved, or "
                    "take the differing options out of the state's param_groups."
                )
    return {option: value for option, (value, _) in found.items()}


def _same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)
