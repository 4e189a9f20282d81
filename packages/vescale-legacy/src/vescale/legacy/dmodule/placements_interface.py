# SPDX-License-Identifier: Apache-2.0
"""``PlacementsInterface``: placements of one value of a plan, and how to bring it there."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from vescale.legacy.dtensor.normalize import normalize_placements
from vescale.legacy.dtensor.placement_types import Placement

__all__ = ["PlacementsInterface"]


@dataclass
class PlacementsInterface:
    """Where a value of a plan goes, and how.

    ``async_op``: the communication may end later. ``defer_reshard``: a partial value is reduced
    at its first use but in a sum. ``run_check`` and ``support_uneven``: of ``from_local``, for a
    plain tensor. ``grad``: the layout that its gradient is given.
    """

    placements: Sequence[Placement] | None = None
    async_op: bool = True
    defer_reshard: bool = False
    run_check: bool = True
    support_uneven: bool = True
    grad: Sequence[Placement] | None = None

    @classmethod
    def from_placements(cls, x: Any) -> "PlacementsInterface":
        """Return bare placements, or None, with all defaults; one of these as it is."""
        return x if isinstance(x, cls) else cls(x)

    def normalize_placements(
        self, mesh_ndim: int, *, tensor_ndim: int = 0, none_as_replicate: bool = False
    ) -> None:
        """Give ``placements`` and ``grad`` one entry for each mesh dim, in place."""
        self.placements = normalize_placements(
            self.placements,
            mesh_ndim,
            tensor_ndim=tensor_ndim,
            none_as_replicate=none_as_replicate,
        )
        self.grad = normalize_placements(self.grad, mesh_ndim, tensor_ndim=tensor_ndim)

    def is_none(self) -> bool:
        """Tell whether all is as by default, so that nothing is asked for."""
        return self == PlacementsInterface()

    def is_placements(self) -> bool:
        """Tell whether only ``placements`` is set."""
        return self.placements is not None and all(
            getattr(self, field.name) == field.default
            for field in fields(self)
            if field.name != "placements"
        )

    def copy(self) -> "PlacementsInterface":
        """Return another one that says the same."""
        return replace(self)
