# SPDX-License-Identifier: Apache-2.0
"""Make DTensors from a size: only this rank's part is filled."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.tensor as stock
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor.random import use_mode
from vescale.legacy.dtensor._utils import check_interleaved
from vescale.legacy.dtensor.conversion import keep_on_first
from vescale.legacy.dtensor.normalize import mesh_or_current, normalize_placements
from vescale.legacy.dtensor.placement_types import Placement, Replicate
from vescale.legacy.dtensor.random import single_device_rand

__all__ = ["arange", "empty", "full", "ones", "rand", "randn", "zeros"]


def zeros(*size: Any, **options: Any) -> DTensor:
    """Return zeros. ``size`` as ints or one sequence.

    Keywords, as in the other functions of this file: ``dtype=None, layout=torch.strided,
    requires_grad=False, device_mesh=None, placements=None``. Without a mesh: that of the active
    ``with mesh:``. Without placements: ``Replicate``. Under ``Partial`` the first rank of the
    mesh dim has the values, and the others zeros.
    """
    return _make(stock.zeros, _size(size), (), **options)


def ones(*size: Any, **options: Any) -> DTensor:
    """Return ones; see ``zeros``."""
    return _make(stock.ones, _size(size), (), **options)


def empty(*size: Any, **options: Any) -> DTensor:
    """Return a tensor without certain values; see ``zeros``."""
    return _make(stock.empty, _size(size), (), **options)


def full(size: Sequence[int], fill_value: Any, **options: Any) -> DTensor:
    """Return a tensor full of one value; see ``zeros``."""
    return _make(stock.full, _size((size,)), (fill_value,), **options)


def rand(*size: Any, **options: Any) -> DTensor:
    """Return this rank's part of ``torch.rand(*size)`` of one device; see ``zeros``.

    Ranks must be seeded alike. Their generators end where that of one device ends. With
    ``VESCALE_SINGLE_DEVICE_RAND=0`` each rank draws for itself.
    """
    return _draw("uniform_", size, options)


def randn(*size: Any, **options: Any) -> DTensor:
    """Return this rank's part of ``torch.randn(*size)`` of one device; see ``rand``."""
    return _draw("normal_", size, options)


def arange(
    *start_end_step: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return this rank's part of ``torch.arange(*start_end_step)``; see ``zeros``.

    Each rank makes the whole range and keeps its part.
    """
    _check_layout(layout)
    mesh = mesh_or_current(device_mesh)
    whole = torch.arange(*start_end_step, dtype=dtype, device=mesh.device_type)
    placements = normalize_placements(placements, mesh.ndim, tensor_ndim=1, none_as_replicate=True)
    check_interleaved(whole.shape, mesh, placements)
    out = stock.distribute_tensor(whole, mesh, _without_partial(placements), src_data_rank=None)
    return _as_partial(out, placements).requires_grad_(requires_grad)  # type: ignore[return-value]  # itself


def _make(
    stock_factory: Any,
    size: torch.Size,
    value: tuple,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    _check_layout(layout)
    mesh = mesh_or_current(device_mesh)
    placements = normalize_placements(
        placements, mesh.ndim, tensor_ndim=len(size), none_as_replicate=True
    )
    check_interleaved(size, mesh, placements)
    out = stock_factory(
        size, *value, dtype=dtype, device_mesh=mesh, placements=_without_partial(placements)
    )
    return _as_partial(out, placements).requires_grad_(requires_grad)  # type: ignore[return-value]  # itself


def _draw(fill: str, size: tuple, options: dict[str, Any]) -> DTensor:
    requires_grad, placements = options.pop("requires_grad", False), options.pop("placements", None)
    mesh = mesh_or_current(options.pop("device_mesh", None))
    placements = normalize_placements(
        placements, mesh.ndim, tensor_ndim=len(_size(size)), none_as_replicate=True
    )
    out = empty(*size, device_mesh=mesh, placements=_without_partial(placements), **options)
    with use_mode("device" if single_device_rand() else "off"):
        getattr(out, fill)()
    return _as_partial(out, placements).requires_grad_(requires_grad)  # type: ignore[return-value]  # itself


def _size(size: tuple) -> torch.Size:
    return torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)


def _check_layout(layout: torch.layout) -> None:
    if layout is not torch.strided:
        raise ValueError(f"layout={layout}: a DTensor has torch.strided.")


def _without_partial(placements: Sequence[Placement]) -> list[Placement]:
    return [Replicate() if placement.is_partial() else placement for placement in placements]


def _as_partial(out: DTensor, placements: Sequence[Placement]) -> DTensor:
    if not any(placement.is_partial() for placement in placements):
        return out
    local = keep_on_first(out.to_local(), out.device_mesh, placements)
    return DTensor.from_local(
        local,
        out.device_mesh,
        placements,
        run_check=False,
        shape=out.shape,
        stride=out.stride(),
    )
