# SPDX-License-Identifier: Apache-2.0
"""Other methods of a wrapped module that run with its parameters gathered, as ``forward`` does."""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from vescale.fsdp.module import FSDPModule, run_gathered


class ForwardMethod:
    """Stands in a module's ``__dict__`` for a method, without keeping the module alive."""

    def __init__(self, module: FSDPModule, method: Callable) -> None:
        bound = inspect.ismethod(method) and method.__self__ is module
        self._module = weakref.ref(module)
        # Of a copy of the module, the same function serves the copy.
        self._bound = bound
        self._function: Callable = method.__func__ if bound else method  # type: ignore[attr-defined]  # bound
        functools.update_wrapper(self, self._function)
        del self.__dict__["__wrapped__"]  # it is called with other arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        function = functools.partial(self._function, module) if self._bound else self._function
        return run_gathered(module, function, args, kwargs)

    def __deepcopy__(self, memo: dict) -> "ForwardMethod":
        copied = object.__new__(ForwardMethod)
        copied.__dict__.update(self.__dict__)
        copied._module = weakref.ref(memo[id(self._module())])
        return copied


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let the method run as a forward does: gather, run, cast and free.

    Does nothing for a module that is not wrapped, so that a script may call it in either case.
    Raises ValueError if there is no such method.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}, expected an nn.Module.")
    if not isinstance(module, FSDPModule):
        return
    if not isinstance(method_name, str):
        raise TypeError(
            f"method_name={method_name!r} is a {type(method_name).__name__}, expected the name of "
            "a method of the module."
        )
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}.")
    if not isinstance(method, ForwardMethod):
        module.__dict__[method_name] = ForwardMethod(module, method)
