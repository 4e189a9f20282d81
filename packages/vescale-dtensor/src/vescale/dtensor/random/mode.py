# SPDX-License-Identifier: Apache-2.0
"""Whether torch's own DTensor draws as one device, and how."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vescale.dtensor._torch_compat import torch_op_handlers
from vescale.dtensor.random import cuda
from vescale.dtensor.random.operators import HANDLERS

MODES = ("device", "off")


@dataclass
class _State:
    mode: str = "off"
    chosen: bool = False  # by the user, so that nothing else changes it
    replaced: dict[Any, Callable | None] | None = None


_state = _State()


def set_mode(mode: str, *, cuda_replay: bool = False) -> None:
    """Let random operators on torch's own DTensor draw what one device draws, or not.

    With "device" the parts of a result are bit for bit those of the operator on one plain tensor,
    for every placement but Partial, and the generators of all ranks end in the state of that one,
    when they were in one state before. It covers in-place fills (so ``torch.nn.init``),
    ``rand_like`` and its like, ``bernoulli`` and dropout. With "off", torch's default, equal parts
    of a sharded CPU tensor hold equal numbers. Tensors of our own class always draw as one device.

    On a CUDA device every rank draws the whole tensor and keeps its part, which takes its memory
    for a moment. ``cuda_replay=True`` draws the part alone, for ``uniform_``, ``normal_``,
    ``bernoulli_`` and ``exponential_`` of numbers, ``rand_like``, ``randn_like`` and dropout of
    tensors below 2 GiB. It is experimental: written from torch's sources, tested by emulation, and
    not yet run on a GPU.

    The mode is this process's, for all threads and meshes; set it alike on all ranks.
    """
    _apply(mode)
    cuda.set_replay(cuda_replay)
    _state.chosen = True


def get_mode() -> str:
    """Return "device" or "off"."""
    return _state.mode


def turn_on() -> None:
    """Set the mode "device", unless the user has chosen one."""
    if not _state.chosen:
        _apply("device")


@contextmanager
def use_mode(mode: str) -> Iterator[None]:
    """Set a mode for the duration of a ``with`` block."""
    before = _state.mode
    _apply(mode)
    try:
        yield
    finally:
        _apply(before)


def _apply(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"got mode={mode!r}; the modes are {', '.join(map(repr, MODES))}.")
    table = torch_op_handlers()
    if mode == "device" and _state.replaced is None:
        _state.replaced = {operator: table.get(operator) for operator in HANDLERS}
        table.update(HANDLERS)
    if mode == "off" and _state.replaced is not None:
        for operator, handler in _state.replaced.items():
            if handler is None:
                del table[operator]
            else:
                table[operator] = handler
        _state.replaced = None
    _state.mode = mode
