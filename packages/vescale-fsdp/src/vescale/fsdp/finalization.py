# SPDX-License-Identifier: Apache-2.0
"""Let the caller say when a backward has ended: names of FSDP2 from PyTorch 2.15 on."""

from vescale.fsdp._torch_compat import current_backward
from vescale.fsdp.arguments import check_bool
from vescale.fsdp.schedule import Schedule
from vescale.fsdp.unit import Unit
from vescale.fsdp.units import ModuleMixin, unit_of


class GradientReductionHandle:
    """Reductions under way; see ``FSDPModule.finalize_backward``."""

    def __init__(self, schedule: Schedule | None) -> None:
        self._schedule = schedule
        if schedule is not None:
            schedule.awaited = self

    def wait(self) -> None:
        """Wait until every sharded ``.grad`` is complete. Further calls do nothing.

        Raises RuntimeError if ``reset_iter_state()`` has dropped these reductions.
        """
        if self._schedule is None:
            return
        if self._schedule.awaited is not self:
            raise RuntimeError(
                "reset_iter_state() has dropped the reductions that this handle waits for; run "
                "forward, backward and finalize_backward() again."
            )
        self._schedule.awaited = None
        self._schedule.turns.finish()
        self._schedule = None


class BackwardFinalization(ModuleMixin):
    """Mixed into ``FSDPModule``."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether the caller ends a backward, by ``finalize_backward()``, on the root.

        With True the end of a backward waits for nothing, whatever ``set_is_last_backward`` says,
        and ``.grad`` is complete only after ``finalize_backward()``. Any number of backwards may
        precede it.

        Raises RuntimeError for a module within the root, inside of a backward, and between a
        backward and its ``finalize_backward()``.
        """
        check_bool("enabled", enabled)
        unit = unit_of(self)
        schedule = unit.schedule
        _check_root(unit, "set_manual_backward_finalization")
        if enabled != unit.manual_finalization and current_backward() != -1:
            raise RuntimeError(
                "set_manual_backward_finalization was called inside of a backward; call it before."
            )
        if schedule is not None and schedule.manual not in (None, enabled):
            raise RuntimeError(
                f"set_manual_backward_finalization({enabled}) was called after a backward that "
                f"began with {schedule.manual}; call finalize_backward() first, or "
                "reset_iter_state()."
            )
        unit.manual_finalization = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what backwards without gradient sync left, and complete every ``.grad``.

        For ``set_manual_backward_finalization(True)``, on the root and on every rank, after all
        backwards of the step. What has gradient sync switched off still is left to wait; so is,
        without all-reduce, what waits for the replicas. Modules that reshard after backward are
        sharded. Before the first forward nothing happens.

        With ``async_op`` the reductions are only launched; ``wait()`` of the returned handle
        completes them, and must come before the gradients are used and before the next forward.

        Raises RuntimeError for a module within the root, unless the caller ends backwards, inside
        of a forward or backward, and while a handle was not waited for.
        """
        check_bool("async_op", async_op)
        unit = unit_of(self)
        schedule = unit.schedule
        if schedule is None:
            return GradientReductionHandle(None) if async_op else None
        _check_root(unit, "finalize_backward")
        manual = unit.manual_finalization if schedule.manual is None else schedule.manual
        if not manual:
            raise RuntimeError(
                "finalize_backward() is for backwards that the caller ends; call "
                "set_manual_backward_finalization(True) before them."
            )
        schedule.finalize()
        if async_op:
            return GradientReductionHandle(schedule)
        schedule.turns.finish()
        return None


def _check_root(unit: Unit, name: str) -> None:
    if unit.schedule is not None and not unit.is_root:
        raise RuntimeError(
            f"{name} was called on a module within the root; call it on the root: the module whose "
            "forward runs the others."
        )
