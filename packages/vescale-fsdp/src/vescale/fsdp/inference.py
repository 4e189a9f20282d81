# SPDX-License-Identifier: Apache-2.0
"""Shards that training can use, also when they are made under ``torch.inference_mode``."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def ordinary_tensors(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return ``function`` such that it makes no inference tensors, for it makes what stays.

    Those count no writes, so that nobody could tell when full parameters are out of date.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run
