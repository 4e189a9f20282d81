# SPDX-License-Identifier: Apache-2.0
"""Check what callers of the public methods pass."""

import warnings
from typing import Any


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is True or False: 1 or None may mean another argument."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass True or False.")


def check_reshard(value: Any) -> None:
    """Raise TypeError unless ``value`` is of a type that ``reshard_after_forward`` may have.

    Warns of 1, which FSDP2 too takes as a number of ranks.
    """
    if value is not None and not isinstance(value, int):
        raise TypeError(
            f"reshard_after_forward={value!r} is a {type(value).__name__}; pass True or False, "
            "None for the default, or a number of ranks."
        )
    if value == 1 and not isinstance(value, bool):
        warnings.warn(
            "reshard_after_forward=1 keeps the full parameters, as False does, because one rank "
            "then has them all; pass True to free them.",
            stacklevel=4,
        )


def reshard_over(value: bool | int | None, shards: int) -> bool | int | None:
    """Return ``reshard_after_forward`` with a number only where it means what no bool does.

    Raises ValueError for a number that does not divide ``shards``, the ranks that shard. A number
    of 1 is False: one rank has all, so that nothing is freed.
    """
    if value is None or isinstance(value, bool):
        return value
    if value < 1 or shards % value:
        raise ValueError(
            f"reshard_after_forward={value} is no divisor of the {shards} ranks that parameters "
            "are sharded over; pass one of its divisors, such as the ranks of one host, or True."
        )
    if value == 1:
        return False
    return True if value == shards else value
