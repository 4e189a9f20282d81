# SPDX-License-Identifier: Apache-2.0
"""What a call does and what a model keeps, as counts that do not scatter as times do."""

import gc
import sys
from collections.abc import Callable, Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

CONTAINERS = (tuple, list, dict, set, frozenset)


def longest_container(*roots: object) -> int:
    """Return the length of the longest container that ``roots`` lead to.

    Classes, functions and modules of Python are not followed, nor is a mesh: there is one for all
    parameters, and it lists its ranks.
    """
    longest, seen, stack = 0, set(), list(roots)
    while stack:
        item = stack.pop()
        if id(item) in seen or not _followed(item):
            continue
        seen.add(id(item))
        if isinstance(item, CONTAINERS):
            longest = max(longest, len(item))
        stack += gc.get_referents(item)
    return longest


def _followed(item: object) -> bool:
    if isinstance(item, nn.Module):
        return True
    return not (isinstance(item, (type, type(sys), DeviceMesh)) or callable(item))


def roots_of(model: nn.Module) -> Iterable[object]:
    """Return where a search in ``model`` begins; the C++ half of a tensor hides its spec."""
    return [*model.modules(), *model.parameters(), *(p._spec for p in model.parameters())]


def count_calls(function: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, a call of ``function`` enters."""
    calls = 0

    def profile(frame, event, arg) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
