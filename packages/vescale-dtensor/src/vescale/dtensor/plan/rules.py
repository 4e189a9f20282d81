# SPDX-License-Identifier: Apache-2.0
"""The rules of a plan: patterns of names, and placements on a mesh axis. Knows no mesh."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

if TYPE_CHECKING:
    from vescale.dtensor.plan.explain import Explanation

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
Argument = int | str


@dataclass(frozen=True)
class Rule:
    """What is to be done with the parameters or modules whose names a pattern matches.

    ``placements`` maps arguments to placements for an input, and None to the one otherwise.
    """

    kind: str
    pattern: str
    placements: tuple[tuple[Argument | None, Placement], ...]
    mesh: str | None
    local: bool = False

    def __str__(self) -> str:
        placements = dict(self.placements)
        what = placements.get(None, placements)
        mesh = "" if self.mesh is None else f", mesh={self.mesh!r}"
        return f"{self.kind}({self.pattern!r}, {what}{mesh}{', local=True' if self.local else ''})"


@dataclass
class Plan:
    """Which placements the parameters of a model have, and its activations at module boundaries.

    Every method adds a rule and returns the plan. A pattern is a regular expression that matches a
    whole name, as ``named_parameters()`` or ``named_modules()`` gives it; it must match at least
    one. ``mesh`` names an axis; it may be left out where the mesh has one axis. Rules for the axes
    of one mesh add up; two rules for the same thing on one axis are an error. Parameters without a
    rule are replicated.
    """

    rules: list[Rule] = field(default_factory=list)

    def param(self, pattern: str, placement: Placement, *, mesh: str | None = None) -> "Plan":
        """Place parameters: ``Shard(dim)``, ``Replicate()`` or a ``RaggedShard``."""
        return self._add("param", pattern, {None: placement}, mesh)

    def input(
        self, pattern: str, arguments: Mapping[Argument, Placement], *, mesh: str | None = None
    ) -> "Plan":
        """Place arguments of modules' forward, by name or by index, before it runs.

        A DTensor is redistributed; a plain tensor is taken as this rank's part of one that is
        placed so, all parts being of one shape. Tuples and lists are entered; what is no tensor, or
        is not passed, stays.
        """
        return self._add("input", pattern, dict(arguments.items()), mesh)

    def output(
        self, pattern: str, placement: Placement, *, mesh: str | None = None, local: bool = False
    ) -> "Plan":
        """Place what modules return, in the same way; with ``local=True`` hand on each rank's part.

        The code that follows a local output then computes with plain tensors: its own part of a
        Shard, or the same on all ranks for Replicate.
        """
        return self._add("output", pattern, {None: placement}, mesh, local)

    def grad(self, pattern: str, placement: Placement, *, mesh: str | None = None) -> "Plan":
        """Leave gradients of parameters in a placement; by default they get their parameter's."""
        return self._add("grad", pattern, {None: placement}, mesh)

    def explain(
        self, module: nn.Module, mesh: DeviceMesh | Sequence[str] | None = None
    ) -> "Explanation":
        """Return what ``parallelize`` would do, as a table; needs no process group.

        ``mesh`` is a mesh, or the names of its axes; by default those that the rules name. Raises
        what ``parallelize`` raises about names.
        """
        from vescale.dtensor.plan.explain import explain

        return explain(self, module, mesh)

    def _add(
        self,
        kind: str,
        pattern: str,
        placements: Mapping[Argument | None, Placement],
        mesh: str | None,
        local: bool = False,
    ) -> "Plan":
        rule = Rule(kind, pattern, tuple(placements.items()), mesh, local)
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"{rule}: the pattern is no regular expression: {error}.") from error
        for argument, placement in placements.items():
            if not isinstance(placement, Placement):
                raise TypeError(
                    f"{rule}: {placement!r} is no placement; give Shard(dim), Replicate() or such."
                )
            if kind == "param" and placement.is_partial():
                raise ValueError(
                    f"{rule}: a parameter is no sum that ranks have yet to form; give Shard(dim), "
                    "Replicate() or a RaggedShard. For gradients there is grad()."
                )
            if argument is not None and not isinstance(argument, int | str):
                raise TypeError(f"{rule}: {argument!r} names no argument; give its name or index.")
        self.rules.append(rule)
        return self


@dataclass(frozen=True)
class Placed:
    """A placement, and the rule that it comes from."""

    placement: Placement
    rule: Rule


ByAxis = Mapping[int, Placed]


@dataclass
class Matches:
    """What the rules of a plan say of one model: by name, then by the place of a mesh axis."""

    axes: tuple[str, ...]
    params: dict[str, dict[int, Placed]] = field(default_factory=dict)
    grads: dict[str, dict[int, Placed]] = field(default_factory=dict)
    inputs: dict[str, dict[Argument, dict[int, Placed]]] = field(default_factory=dict)
    outputs: dict[str, dict[int, Placed]] = field(default_factory=dict)


def match(plan: Plan, module: nn.Module, axes: tuple[str, ...] | None) -> Matches:
    """Apply the patterns of ``plan`` to the names in ``module``; ``axes`` are the mesh's names.

    Raises ValueError, naming the rule, when it matches nothing, names another axis or an argument
    that a forward does not have, or says once more what another rule says.
    """
    if axes is None:
        axes = tuple(dict.fromkeys(rule.mesh for rule in plan.rules if rule.mesh)) or ("",)
    params = [clean(name) for name, _ in module.named_parameters(remove_duplicate=False)]
    owners = {clean(n): m for n, m in module.named_modules(remove_duplicate=False)}
    modules = list(owners)
    found = Matches(axes)
    for rule in plan.rules:
        axis = _axis(rule, axes)
        names = params if rule.kind in ("param", "grad") else modules
        matched = [name for name in names if re.fullmatch(rule.pattern, name)]
        if not matched:
            what = "parameter" if names is params else "module"
            raise ValueError(
                f"{rule} matches no {what}; a pattern must match a whole name, such as "
                f"{', '.join(map(repr, names[:3] + names[-2:])) or '(there is none)'}."
            )
        for name in matched:
            for argument, placement in rule.placements:
                target = getattr(found, f"{rule.kind}s").setdefault(name, {})
                if rule.kind == "input":
                    known = _argument(rule, name, owners[name], argument)
                    target = target.setdefault(known, {})
                if axis in target:
                    raise ValueError(
                        f"{rule} and {target[axis].rule} both place "
                        f"{name or 'the whole model'!r} on one axis; keep one of them."
                    )
                target[axis] = Placed(placement, rule)
    return found


def placements_on(ruled: ByAxis, ndim: int) -> tuple[Placement, ...]:
    """Return one placement per axis: those of the rules, and Replicate."""
    return tuple(ruled[axis].placement if axis in ruled else Replicate() for axis in range(ndim))


def clean(name: str) -> str:
    """Return a name without the parts that wrappers of checkpointing and compiling add."""
    for wrapper in WRAPPERS:
        name = f"{name}.".replace(wrapper, "")[: len(name)]
        name = name.removesuffix(".")
    return name


def _argument(rule: Rule, name: str, owner: nn.Module, argument: Argument | None) -> Argument:
    """Return the name of an argument of a forward; an index only for one without a name."""
    parameters = inspect.signature(owner.forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if argument in parameters or (
        isinstance(argument, str) and inspect.Parameter.VAR_KEYWORD in kinds
    ):
        return argument  # type: ignore[return-value]  # a name
    if isinstance(argument, int) and argument >= 0:
        positional = [n for n, p in parameters.items() if p.kind in _POSITIONAL]
        if argument < len(positional):
            return positional[argument]
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            return argument
    raise ValueError(
        f"{rule}: the forward of {name or type(owner).__name__!r} has no argument {argument!r}; it "
        f"has {', '.join(parameters)}."
    )


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _axis(rule: Rule, axes: tuple[str, ...]) -> int:
    if rule.mesh is None and len(axes) == 1:
        return 0
    if rule.mesh not in axes:
        said = "names no axis" if rule.mesh is None else f"is for an axis {rule.mesh!r}"
        raise ValueError(
            f"{rule} {said}, but the mesh has the axes {axes}; pass mesh=, one of them."
        )
    return axes.index(rule.mesh)
