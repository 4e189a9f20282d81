# SPDX-License-Identifier: Apache-2.0
"""torch's DTensorSpec for ragged placements, and the layout that it implies on this rank."""

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale.dtensor._torch_compat import (
    DTensorSpec,
    TensorMeta,
    TorchDTensor,
    spec_with_meta,
)
from vescale.dtensor.layout import (
    Layout,
    chunk_lengths,
    contiguous_stride,
    make_layout,
    sharded_block,
)
from vescale.dtensor.placement import RaggedShard
from vescale.dtensor.runs import total

__all__ = [
    "base_block",
    "base_placements",
    "check_fits_every_rank",
    "check_is_ours",
    "check_local_shape",
    "layout_of",
    "local_shape",
    "make_spec",
    "normalize_placements",
    "ragged_axis",
    "ragged_spec",
    "replace",
    "replicated_spec",
    "spec_with_dtype",
    "without_caches",
]

# Where a spec keeps its layout. Not a field: it takes no part in equality, and ``DTensor`` drops
# it when it is pickled.
LAYOUT = "_vescale_layout"
SCALARS = "_vescale_scalars"


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype,
    stride: Sequence[int] | None = None,
) -> DTensorSpec:
    """Return a spec of a tensor of global ``shape``, row-major unless ``stride`` is given."""
    shape = torch.Size(shape)
    stride = contiguous_stride(shape) if stride is None else tuple(stride)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, dtype))


def ragged_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype,
    stride: Sequence[int] | None = None,
) -> DTensorSpec:
    """Return a checked spec, with this rank's layout computed, for ``make_ragged``.

    It takes a while, so make one per tensor and keep it.
    """
    shape = tuple(shape)
    if stride is not None and tuple(stride) != contiguous_stride(shape):
        raise ValueError(
            f"a ragged tensor is row-major, so shape {shape} has strides "
            f"{contiguous_stride(shape)}, not {tuple(stride)}; make it contiguous first."
        )
    spec = make_spec(mesh, normalize_placements(placements, mesh, len(shape)), shape, dtype)
    layout_of(spec)
    return spec


def layout_of(spec: DTensorSpec) -> Layout | None:
    """Return this rank's layout, or None when no placement is ragged; computed once per spec.

    Raises ValueError when units, mesh axis and shape do not fit, or two placements are ragged;
    NotImplementedError for a placement that cannot be combined with a ragged one.
    """
    try:
        return spec._vescale_layout  # type: ignore[attr-defined]  # our own
    except AttributeError:
        pass
    layout = spec.__dict__[LAYOUT] = _layout(spec.mesh, spec.placements, spec.tensor_meta.shape)
    return layout


def ragged_layout_of(spec: DTensorSpec) -> Layout:
    """Return this rank's layout where some placement is known to be ragged."""
    return layout_of(spec)


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return ``spec`` with another dtype; a computed layout is carried over."""
    meta = spec.tensor_meta
    return spec_with_meta(spec, meta.shape, meta.stride, dtype)


def replicated_spec(
    spec: DTensorSpec, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a replicated tensor on the mesh of ``spec``; 0-dim ones are kept."""
    replicate = (Replicate(),) * spec.mesh.ndim
    if len(shape):
        return make_spec(spec.mesh, replicate, shape, dtype, stride)
    cache = spec.__dict__.setdefault(SCALARS, {})
    found = cache.get(dtype)
    if found is None:
        found = cache[dtype] = make_spec(spec.mesh, replicate, (), dtype)
    return found


def without_caches(spec: DTensorSpec) -> DTensorSpec:
    """Return a copy of ``spec`` as torch would make it, fit to be pickled."""
    clean = copy.copy(spec)
    for name in (LAYOUT, SCALARS):
        clean.__dict__.pop(name, None)
    return clean


def ragged_axis(placements: Sequence[Placement]) -> int | None:
    """Return the mesh axis of the RaggedShard among ``placements``, or None."""
    axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, RaggedShard)]
    if len(axes) > 1:
        raise ValueError(
            f"placements {tuple(placements)} cut one tensor raggedly on mesh axes {axes}; use one "
            "RaggedShard per tensor, and Shard or Replicate on the other axes."
        )
    return axes[0] if axes else None


def check_fits_every_rank(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> None:
    """Raise ValueError, on all ranks, when a ragged cut does not fit what some rank has left.

    ``ragged_spec`` looks at this rank alone: the units of a library may differ between ranks.
    """
    ragged = ragged_axis(placements)
    if ragged is None:
        return
    lengths = [{length} for length in shape]
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            lengths[placement.dim] = set().union(
                *(chunk_lengths(length, mesh.size(axis)) for length in lengths[placement.dim])
            )
    # Dims are sharded by axes of their own, so every combination is some rank's.
    cut: Any = placements[ragged]
    for left in itertools.product(*(sorted(some, reverse=True) for some in lengths)):
        _check_rows(cut, left, tuple(shape), "some ranks")


def _check_rows(
    ragged: RaggedShard, left: tuple[int, ...], shape: tuple[int, ...], where: str
) -> None:
    rows, units = math.prod(left[: len(ragged.dims)]), total(ragged.runs)
    if left != shape and ragged.owner is None and rows % units:
        raise ValueError(
            f"{ragged} has {units} units in total, but the other placements leave {left} of "
            f"{shape} on {where}: {rows} rows over dims {ragged.dims}, which is not a multiple; "
            "choose units whose sum divides the rows on every rank, or cut more dims."
        )


def check_is_ours(x: torch.Tensor) -> None:
    """Raise NotImplementedError when ``x`` is ragged and of torch's own class.

    torch's functions leave such a tensor uncut, so its local part is not what its spec says.
    """
    if type(x) is TorchDTensor and ragged_axis(x._spec.placements) is not None:
        raise NotImplementedError(
            f"a tensor of {x._spec.placements} is of torch's own class, which does not cut it "
            "raggedly, so its parts are wrong; make it by functions of vescale.dtensor: "
            "distribute_tensor, zeros, ..., or redistribute_many([x], placements) from placements "
            "of torch's."
        )


def replace(
    placements: Sequence[Placement], axis: int, placement: Placement
) -> tuple[Placement, ...]:
    """Return ``placements`` with the one of ``axis`` replaced."""
    return (*placements[:axis], placement, *placements[axis + 1 :])


def base_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return ``placements`` before the ragged cut: RaggedShard becomes Replicate."""
    return tuple(Replicate() if isinstance(p, RaggedShard) else p for p in placements)


def normalize_placements(
    placements: Sequence[Placement] | None, mesh: DeviceMesh, ndim: int
) -> tuple[Placement, ...]:
    """Return one placement per mesh axis, with shard dims counted from the front.

    None means Replicate everywhere. Raises ValueError on a wrong count or dim, TypeError on
    something that is not a placement.
    """
    if isinstance(mesh, Placement | list | tuple):
        raise TypeError(
            f"expected a DeviceMesh, got {mesh!r}; the mesh comes before the placements, so pass "
            "those as placements=[...]."
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"expected a DeviceMesh, got {mesh!r}; make one with init_device_mesh('cpu', (4,))."
        )
    if placements is None:
        return (Replicate(),) * mesh.ndim
    if isinstance(placements, Placement) or not isinstance(placements, Iterable):
        raise TypeError(
            f"expected placements, got {placements!r}; give a list, with one per mesh axis."
        )
    placements = tuple(placements)
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"got {len(placements)} placements {placements} for a mesh of {mesh.ndim} axes; "
            "give one per axis."
        )
    for placement in placements:
        if not isinstance(placement, Placement):
            raise TypeError(
                f"expected placements, got {placement!r} in {placements}; give RaggedShard, "
                "Shard, Replicate() or Partial(), one per mesh axis."
            )
    return tuple(_normalize(placement, ndim, placements) for placement in placements)


def _normalize(placement: Placement, ndim: int, placements: Sequence[Placement]) -> Placement:
    if type(placement) is not Shard:
        return placement
    if not -ndim <= placement.dim < ndim:
        raise ValueError(f"{placement} of {placements} is out of range for a {ndim}-D tensor.")
    return Shard(placement.dim + ndim) if placement.dim < 0 else placement


def _layout(mesh: DeviceMesh, placements: tuple, shape: Sequence[int]) -> Layout | None:
    axis = ragged_axis(placements)
    if axis is None:
        return None
    ragged, shape = placements[axis], tuple(shape)
    if ragged.axis_size != mesh.size(axis):
        raise ValueError(
            f"{ragged} has {ragged.axis_size} units, but mesh axis {axis} has "
            f"{mesh.size(axis)} ranks; give one unit count per rank."
        )
    base = base_placements(placements)
    for placement in base:
        if type(placement) not in (Replicate, Shard, Partial):
            raise NotImplementedError(
                f"{placement} cannot be combined with {ragged}; use Shard, Replicate or Partial "
                "on the other mesh axes."
            )
    offset = (0,) * len(shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this process is not in the mesh: it holds nothing
        return Layout(ragged, axis, shape, offset, 0, 0)
    left, offset = base_block(shape, placements, mesh.shape, coordinate)
    _check_rows(ragged, left, shape, "this rank")
    pending = any(placement.is_partial() for placement in base)
    return make_layout(ragged, axis, left, offset, coordinate[axis], pending)


def local_shape(spec: DTensorSpec) -> tuple[int, ...]:
    """Return the shape of this rank's local tensor; one-dimensional for a ragged placement."""
    layout = layout_of(spec)
    if layout is not None:
        return (layout.numel,)
    mesh, shape = spec.mesh, tuple(spec.tensor_meta.shape)
    return base_block(shape, spec.placements, mesh.shape, mesh.get_coordinate())[0]


def check_local_shape(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> None:
    """Raise ValueError unless ``local`` is what plain ``placements`` leave here of ``shape``."""
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(type(p) not in (Replicate, Shard, Partial) for p in placements):
        return
    expected = base_block(tuple(shape), placements, mesh.shape, coordinate)[0]
    if tuple(local.shape) != expected:
        raise ValueError(
            f"the local tensor has shape {tuple(local.shape)}, but {tuple(placements)} gives this "
            f"rank {expected} of a tensor of shape {tuple(shape)}; use RaggedShard for a cut "
            "other than that of torch.chunk."
        )


def base_block(
    shape: tuple[int, ...],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset) of what Shard placements leave at ``coordinate`` of the mesh."""
    cuts = [
        (placement.dim, mesh_shape[axis], coordinate[axis])
        for axis, placement in enumerate(placements)
        if type(placement) is Shard
    ]
    return sharded_block(shape, cuts) if cuts else (shape, (0,) * len(shape))
