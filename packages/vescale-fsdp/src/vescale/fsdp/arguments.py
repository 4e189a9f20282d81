# SPDX-License-Identifier: Apache-2.0
"""Check what callers of the public methods pass."""

from typing import Any


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is True or False: 1 or None may mean another argument."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass True or False.")


def check_reshard(value: Any, *, optional: bool) -> None:
    """Raise TypeError or NotImplementedError unless ``value`` can be ``reshard_after_forward``."""
    if isinstance(value, bool) or (optional and value is None):
        return
    if isinstance(value, int):
        raise NotImplementedError(
            f"reshard_after_forward={value}: a smaller world's copy is not supported yet; pass "
            "True or False."
        )
    raise TypeError(
        f"reshard_after_forward={value!r} is a {type(value).__name__}; pass True or False"
        + (", or None for the default." if optional else ".")
    )
