# SPDX-License-Identifier: Apache-2.0
"""``DebugLogger``: the process-wide switch of the old API, and what is printed while it is on."""

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from vescale.legacy.debug.describe import call_site, describe, name_of
from vescale.legacy.debug.trace import OpTrace

__all__ = ["DebugLogger"]

ALL_RANKS = (-1,)
VARIABLE = "VESCALE_DEBUG_MODE"


class DebugLogger:
    """Print every DTensor operation and every collective of the ranks chosen. Never instantiated.

    One line per operation: rank, module path, file:line, operator, inputs, outputs, with shapes,
    placements and mesh; one per collective: name, shapes, the ranks of its group. Contents are
    never read, so nothing waits for a device. Watches the thread that turned it on.
    """

    IS_DEBUG_MODE: ClassVar[bool] = False
    _ranks: ClassVar[tuple[int, ...]] = (0,)
    _logger: ClassVar[Any] = None
    _trace: ClassVar[OpTrace | None] = None

    @classmethod
    def set_vescale_debug_mode(
        cls,
        on: bool = True,
        *,
        rank_to_print: int | Sequence[int] | None = None,
        logger: Any = None,
    ) -> None:
        """Turn printing on or off; turning it on again only changes ranks and logger.

        ``rank_to_print``: a rank, a tuple or list of ranks, ``(-1,)`` for all, None for rank 0.
        ``logger``: anything with a ``debug(text)`` method; None prints to stdout. Turn off where
        it was turned on: the same thread, and not inside a ``with`` block of another dispatch
        mode entered since, else ``RuntimeError``.
        """
        if not on:
            cls._close()
            return
        ranks = _checked_ranks(rank_to_print)
        if logger is not None and not callable(getattr(logger, "debug", None)):
            raise TypeError(
                f"logger={logger!r} has no debug method; pass a logging.Logger, or None for stdout."
            )
        cls._ranks, cls._logger = ranks, logger
        if cls._trace is None:
            trace = OpTrace(cls._prints_here, cls.log_op, cls.log_communication)
            trace.open()
            cls._trace = trace
        cls.IS_DEBUG_MODE = True

    @classmethod
    def update_vescale_debug_mode_from_env(cls) -> None:
        """Follow ``VESCALE_DEBUG_MODE``: 1 is on for all ranks, 0 is off, unset is no change."""
        value = os.environ.get(VARIABLE)
        if value is None:
            return
        if value not in ("0", "1"):
            raise ValueError(f"{VARIABLE}={value!r}, expected '0' or '1'.")
        cls.set_vescale_debug_mode(value == "1", rank_to_print=ALL_RANKS)

    @classmethod
    def log(cls, *args: Any) -> None:
        """Print the arguments, tensors by shape and placement. Nothing while off."""
        if cls._prints_here():
            cls._emit(*(describe(arg) for arg in args))

    @classmethod
    def log_communication(cls, func: Any, *args: Any) -> None:
        """Print one collective: ``func`` (a function, an operator or a name) and its arguments."""
        if cls._prints_here():
            arguments = ", ".join(describe(arg) for arg in args)
            cls._emit(*cls._where(), f"{name_of(func)}({arguments})")

    @classmethod
    def log_op(cls, op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Print one operation, its inputs and ``out``, which may be the exception it raised."""
        if cls._prints_here():
            inputs = [describe(arg) for arg in args]
            inputs += [f"{key}={describe(value)}" for key, value in kwargs.items()]
            result = f"raised {type(out).__name__}" if isinstance(out, Exception) else describe(out)
            cls._emit(*cls._where(), f"{name_of(op)}({', '.join(inputs)}) -> {result}")

    @classmethod
    def _close(cls) -> None:
        if cls._trace is not None:
            cls._trace.close()
        cls.IS_DEBUG_MODE = False
        cls._ranks, cls._logger, cls._trace = (0,), None, None

    @classmethod
    def _prints_here(cls) -> bool:
        return cls.IS_DEBUG_MODE and (cls._ranks == ALL_RANKS or _rank() in cls._ranks)

    @classmethod
    def _where(cls) -> list[str]:
        path = cls._trace.module_path if cls._trace is not None else ""
        return [path or "(no module)", call_site()]

    @classmethod
    def _emit(cls, *parts: str) -> None:
        text = " | ".join([f"[rank {_rank()}]", *parts])
        if cls._logger is None:
            print(text, flush=True)
        else:
            cls._logger.debug(text)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _checked_ranks(rank_to_print: int | Sequence[int] | None) -> tuple[int, ...]:
    if rank_to_print is None:
        return (0,)
    ranks = (rank_to_print,) if isinstance(rank_to_print, int) else rank_to_print
    if (
        isinstance(rank_to_print, bool)
        or not isinstance(ranks, tuple | list)
        or not all(isinstance(rank, int) for rank in ranks)
    ):
        raise TypeError(
            f"rank_to_print={rank_to_print!r}, expected an int, a tuple or list of ints, or None."
        )
    if tuple(ranks) != ALL_RANKS and any(rank < 0 for rank in ranks):
        raise ValueError(
            f"rank_to_print={rank_to_print!r} has a negative rank; for all ranks give (-1,) alone."
        )
    return tuple(ranks)
