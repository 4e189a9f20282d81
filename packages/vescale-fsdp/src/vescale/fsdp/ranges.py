# SPDX-License-Identifier: Apache-2.0
"""Ranges by which profilers show what a unit does."""

from contextlib import AbstractContextManager, nullcontext

import torch

from vescale.fsdp._torch_compat import profiler_runs


def profiled(what: str, unit: str) -> AbstractContextManager:
    """Return a range ``vescale.fsdp.what unit`` of torch's profiler, NVTX or ITT, if one runs.

    Entering a range costs as much as two operators, so there is none without.
    """
    if not profiler_runs():
        return nullcontext()
    return torch.profiler.record_function(f"vescale.fsdp.{what} {unit}")
