# SPDX-License-Identifier: Apache-2.0
"""Several roots, such as the chunks of a pipeline stage, that share what limits communication."""

from collections.abc import Sequence
from typing import Any

from vescale.fsdp.module import FSDPModule, become_root
from vescale.fsdp.units import unit_of


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let the roots ``modules`` share one limit of reductions in flight, and their order.

    Call it when everything is wrapped. A reduction of one root then waits for that of another, so
    their gradient buffers are not in memory together. Gathers need no sharing: all buffers come
    from the current stream. Raises TypeError or ValueError for anything else than wrapped modules.
    """
    if not isinstance(modules, (list, tuple)):
        raise TypeError(
            f"modules is a {type(modules).__name__}, expected a list of wrapped modules."
        )
    schedules: list[Any] = []
    for unit in [unit_of(module) for module in modules]:
        if unit.schedule is None:
            become_root(unit)
        schedules.append(unit.schedule)
    for schedule in schedules[1:]:
        schedule.turns.share(schedules[0].turns)
