# SPDX-License-Identifier: Apache-2.0
"""Watch operations go by: DTensor's, and the collectives under them or called directly."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils.module_tracker import ModuleTracker

from vescale.legacy._torch_compat import (
    OpOverload,
    TorchDispatchMode,
    argument_names,
    as_process_group,
    top_dispatch_mode,
)

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
# These move nothing: they wait for, or wrap, the result of a collective already reported.
NOT_COLLECTIVE = ("wait_tensor", "_wrap_tensor_autograd")
GROUP_ARGUMENTS = ("group_name", "process_group")


class OpTrace(TorchDispatchMode):
    """While open, report each DTensor operation and each collective of this thread.

    ``log_op(op, args, kwargs, out)`` is called when an operation has ended; ``out`` is the
    exception if it raised one. ``log_collective(op, *args)`` is called before a collective
    starts, so the last line of a job that hangs names it; groups stand in the place of their
    names. Backward passes that this thread starts are watched too. While ``wanted()`` is False
    nothing is reported.
    """

    supports_higher_order_operators = True  # DTensor's random operations are such

    def __init__(
        self, wanted: Callable[[], bool], log_op: Callable, log_collective: Callable
    ) -> None:
        super().__init__()
        self._wanted, self._log_op, self._log_collective = wanted, log_op, log_collective
        self._modules = ModuleTracker()
        self._handing_on = False

    def open(self) -> None:
        """Start watching this thread."""
        self._modules.__enter__()
        self.__enter__()

    def close(self) -> None:
        """Stop watching. ``RuntimeError`` unless this is the dispatch mode opened last."""
        if top_dispatch_mode() is not self:
            raise RuntimeError(
                f"the dispatch mode on top is {top_dispatch_mode()}, not the debug trace; turn "
                "debug mode off in the thread, and at the nesting of `with` blocks, where it "
                "was turned on."
            )
        self.__exit__(None, None, None)
        self._modules.__exit__()

    @property
    def module_path(self) -> str:
        """The innermost module running forward or backward, as ``Net.layers.0``; or empty."""
        return max(self._modules.parents - {"Global"}, key=len, default="")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            if self._handing_on or not self._wanted():
                self._handing_on = False
                return NotImplemented  # let DTensor run it
            return self._watch(func, args, kwargs)
        if self._wanted() and _is_collective(func):
            self._log_collective(func, *_with_groups(func, args), *kwargs.values())
        return func(*args, **kwargs)

    def _watch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        # Torch turns a mode off while its handler runs. Turn it on again, or the collectives
        # inside this operation would pass unseen; the flag stops the operation itself from
        # coming back here for ever.
        self._handing_on = True
        try:
            with self:
                out = func(*args, **kwargs)
        except Exception as error:
            self._log_op(func, args, kwargs, error)
            raise
        finally:
            self._handing_on = False
        self._log_op(func, args, kwargs, out)
        return out


def _is_collective(func: Any) -> bool:
    if not isinstance(func, OpOverload):
        return False
    namespace, _, name = func.name().partition("::")
    return namespace in NAMESPACES and name not in NOT_COLLECTIVE


def _with_groups(func: OpOverload, args: Sequence[Any]) -> list[Any]:
    """Return ``args`` with process groups in the place of what stands for them."""
    return [
        as_process_group(arg) if name in GROUP_ARGUMENTS else arg
        for name, arg in zip(argument_names(func), args, strict=False)  # defaults may be left out
    ]
