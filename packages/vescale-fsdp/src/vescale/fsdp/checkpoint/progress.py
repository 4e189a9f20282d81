# SPDX-License-Identifier: Apache-2.0
"""What all ranks know of a run, as JSON and back, with keys of dicts as they were.

JSON makes texts of all keys. Dicts with other ones, such as the milestones in the state of a
``MultiStepLR``, become lists of pairs.
"""

import json
from typing import Any

PAIRS = "@pairs"  # the one key of what stands for a dict with keys that are no texts
_PLAIN = (str, int, float, type(None))  # bool is an int


def to_json(progress: Any) -> Any:
    """Return ``progress`` in what JSON has; raises TypeError for what cannot be kept."""
    try:
        return json.loads(json.dumps(_encoded(progress)))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"progress has something that JSON does not: {error}; pass numbers, texts, lists and "
            "dicts, and what only a rank knows or tensors as rank_state."
        ) from error


def from_json(data: Any) -> Any:
    """Return what ``to_json`` was given, with lists for tuples."""
    if isinstance(data, list):
        return [from_json(value) for value in data]
    if not isinstance(data, dict):
        return data
    if data.keys() == {PAIRS}:
        return {key: from_json(value) for key, value in data[PAIRS]}
    return {key: from_json(value) for key, value in data.items()}


def _encoded(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_encoded(x) for x in value]
    if not isinstance(value, dict):
        return value
    if odd := [key for key in value if not isinstance(key, _PLAIN)]:
        raise TypeError(f"{odd[0]!r} as a key of a dict")
    if PAIRS in value or not all(isinstance(key, str) for key in value):
        return {PAIRS: [[key, _encoded(x)] for key, x in value.items()]}
    return {key: _encoded(x) for key, x in value.items()}
