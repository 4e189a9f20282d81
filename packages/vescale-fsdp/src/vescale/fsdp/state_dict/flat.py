# SPDX-License-Identifier: Apache-2.0
"""Optimizer states with one level of keys, as ``flatten_optimizer_state_dict`` asks for.

``state.<fqn>.<name>`` and ``param_groups.<fqn>.<option>``: every parameter has its own options, so
groups may be others when it is loaded.
"""

from collections.abc import Iterable, Mapping
from typing import Any

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested ``state`` flat. Values are the same objects."""
    flat: dict[str, Any] = {}
    for fqn, values in state[STATE].items():
        _flatten_into(flat, f"{STATE}.{fqn}", values)
    for group in state[GROUPS]:
        for fqn in group[PARAMS]:
            for option, value in group.items():
                if option != PARAMS:
                    flat[f"{GROUPS}.{fqn}.{option}"] = value
    return flat


def is_flat(state: Mapping[str, Any]) -> bool:
    """Tell whether ``state`` is flat."""
    return not {STATE, GROUPS} <= state.keys()


def unflatten(flat: Mapping[str, Any], fqns: Iterable[str]) -> dict[str, Any]:
    """Return ``flat`` nested, with a group for every parameter; ``fqns`` are those it may name.

    Raises ValueError, naming them, for keys of none of these.
    """
    known, unknown = set(fqns), []
    state: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, rest = key.partition(".")
        fqn = _owner(rest, known)
        if section not in (STATE, GROUPS) or fqn is None:
            unknown.append(key)
        elif section == STATE:
            _put(state.setdefault(fqn, {}), rest[len(fqn) + 1 :].split("."), value)
        else:
            options.setdefault(fqn, {})[rest[len(fqn) + 1 :]] = value
    if unknown:
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        raise ValueError(
            f"the flat optimizer state has keys of no parameter here: {unknown[:10]}{more}; "
            "take them out, or pass the model that has the parameters."
        )
    groups = [{PARAMS: [fqn], **options.get(fqn, {})} for fqn in {**state, **options}]
    return {STATE: state, GROUPS: groups}


def _owner(rest: str, known: set[str]) -> str | None:
    """Return the longest name in ``known`` that ``rest`` begins with, a key after it."""
    parts = rest.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (fqn := ".".join(parts[:end])) in known:
            return fqn
    return None


def _flatten_into(flat: dict[str, Any], prefix: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten_into(flat, f"{prefix}.{key}", item)
    else:
        flat[prefix] = value


def _put(state: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value
