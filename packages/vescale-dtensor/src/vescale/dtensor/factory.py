# SPDX-License-Identifier: Apache-2.0
"""Make distributed tensors: from a whole tensor, or filled."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor import empty as torch_empty

from vescale.dtensor import comm
from vescale.dtensor._torch_compat import TorchDTensor, current_mesh
from vescale.dtensor.layout import chunk_numels
from vescale.dtensor.spec import (
    check_fits_every_rank,
    normalize_placements,
    ragged_axis,
    ragged_layout_of,
    ragged_spec,
)
from vescale.dtensor.tensor import DTensor, adopt, make_ragged


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a whole tensor, which every rank passes with the same shape and dtype.

    Only the values of ``src_data_rank`` count, a rank of each mesh axis: one collective per axis
    sends every rank its part. ``src_data_rank=None`` takes each rank's own values and does not
    communicate. The result is a leaf with the ``requires_grad`` of ``tensor``. A ragged one does
    not share its memory; with Replicate it may, as in torch.

    Raises ValueError when the placements do not fit the mesh or the shape.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"distribute_tensor got a {type(tensor).__name__}; make a tensor of it first, as with "
            "torch.tensor()."
        )
    mesh = device_mesh or current_mesh()
    placements = normalize_placements(placements, mesh, tensor.ndim)
    _check_source(src_data_rank, mesh)
    if ragged_axis(placements) is None:
        if isinstance(tensor, TorchDTensor) and ragged_axis(tensor.placements) is not None:
            raise _use_redistribute(tensor, placements)
        if isinstance(tensor, DTensor):
            tensor = tensor.as_torch()
        return adopt(torch_distribute_tensor(tensor, mesh, placements, src_data_rank=src_data_rank))
    if isinstance(tensor, TorchDTensor):
        raise _use_redistribute(tensor, placements)
    if not tensor.is_leaf:
        raise ValueError(
            "distribute_tensor takes leaf tensors and does not record a gradient; use "
            "DTensor.from_local and redistribute() inside a graph."
        )
    if src_data_rank is not None:  # else no other rank waits for this one
        check_fits_every_rank(mesh, placements, tensor.shape)
    spec = ragged_spec(mesh, placements, tensor.shape, tensor.dtype)
    layout, whole = ragged_layout_of(spec), tensor.detach()
    if not whole.is_meta and whole.device.type != mesh.device_type:
        whole = whole.to(mesh.device_type)
    if mesh.get_coordinate() is None or whole.is_meta:
        local = whole.new_empty(layout.numel)
    else:
        for axis, placement in enumerate(placements):
            if axis != layout.axis:
                whole = _distribute_axis(whole, mesh, axis, placement, src_data_rank)
        flat = whole.reshape(-1)
        if src_data_rank is None:
            local = flat[layout.start : layout.end].clone()
        else:
            group = mesh.get_group(layout.axis)
            local = comm.scatter(flat, layout.split_numels, src_data_rank, group)
    return make_ragged(local, spec, tensor.requires_grad)


def _use_redistribute(x: TorchDTensor, placements: Sequence[Placement]) -> ValueError:
    return ValueError(
        f"distribute_tensor takes a whole tensor, but got a DTensor of {x.placements}; use "
        f"redistribute_many([x], placements), or redistribute() of our class, to move it to "
        f"{placements}."
    )


def _check_source(source: int | None, mesh: DeviceMesh) -> None:
    if source is None:
        return
    if not isinstance(source, int):
        raise TypeError(
            f"distribute_tensor got src_data_rank={source!r}, but it is an int, or None to take "
            "every rank's own values."
        )
    if not 0 <= source < min(mesh.shape):
        raise ValueError(
            f"distribute_tensor got src_data_rank={source}, a rank of each mesh axis, but the axes "
            f"of {tuple(mesh.shape)} have at least {min(mesh.shape)} ranks each; choose one below."
        )


def _distribute_axis(
    whole: torch.Tensor, mesh: DeviceMesh, axis: int, placement: Placement, source: int | None
) -> torch.Tensor:
    """Apply one plain placement to ``whole`` (what the axes before have left)."""
    group, rank = mesh.get_group(axis), mesh.get_local_rank(axis)
    if isinstance(placement, Shard):
        lengths = chunk_numels(whole.shape[placement.dim], mesh.size(axis))
        parts = whole.split(lengths, placement.dim)
        if source is None:
            return parts[rank]
        flat = torch.cat([part.reshape(-1) for part in parts])
        received = comm.scatter(flat, [part.numel() for part in parts], source, group)
        return received.view(parts[rank].shape)
    if not isinstance(placement, Replicate):
        raise NotImplementedError(
            f"distribute_tensor cannot make {placement} next to a RaggedShard; use Replicate or "
            "Shard there."
        )
    return whole if source is None else comm.broadcast(whole, source, group)


def empty(*size: int | Sequence[int], **options: Any) -> DTensor:
    """Return an uninitialised DTensor; see ``zeros`` for the options."""
    return _make(size, options, lambda local: local)


def zeros(*size: int | Sequence[int], **options: Any) -> DTensor:
    """Return a DTensor of zeros, made without communication or a whole tensor.

    ``size`` is the global shape, as ints or as one sequence. Options, as for torch's own
    factories: ``dtype``, ``requires_grad``, ``device_mesh`` (default: the current mesh),
    ``placements`` (default: replicated) and ``layout`` (only ``torch.strided``).
    """
    return _make(size, options, torch.Tensor.zero_)


def ones(*size: int | Sequence[int], **options: Any) -> DTensor:
    """Return a DTensor of ones; see ``zeros`` for the options."""
    return _make(size, options, lambda local: local.fill_(1))


def full(size: Sequence[int], fill_value: complex, **options: Any) -> DTensor:
    """Return a DTensor filled with ``fill_value``; see ``zeros`` for the options.

    Without ``dtype`` it is the one that ``torch.full`` gives for ``fill_value``.
    """
    options.setdefault("dtype", torch.full((), fill_value).dtype)
    return _make((size,), options, lambda local: local.fill_(fill_value))


def rand(*size: int | Sequence[int], **options: Any) -> DTensor:
    """Return uniform numbers of [0, 1), the same as ``torch.rand`` gives on one device.

    So it is for every placement when all ranks' generators are in the same state. On the CPU a
    rank needs memory for its part alone, elsewhere for one whole tensor for a moment. See ``zeros``
    for the options.
    """
    return _draw(torch.Tensor.uniform_, size, options)


def randn(*size: int | Sequence[int], **options: Any) -> DTensor:
    """Return standard normal numbers, the same as ``torch.randn`` on one device; see ``rand``."""
    return _draw(torch.Tensor.normal_, size, options)


def _make(size: tuple, options: dict, fill: Callable[[torch.Tensor], object]) -> DTensor:
    shape, mesh, placements, dtype, requires_grad = _read(size, options)
    if ragged_axis(placements) is None:
        x = adopt(torch_empty(shape, dtype=dtype, device_mesh=mesh, placements=placements))
    else:
        spec = ragged_spec(mesh, placements, shape, dtype)
        numel = ragged_layout_of(spec).numel
        x = make_ragged(torch.empty(numel, dtype=dtype, device=mesh.device_type), spec)
    fill(x._local_tensor)
    x.requires_grad_(requires_grad)
    return x


def _draw(draw: Callable[[torch.Tensor], object], size: tuple, options: dict) -> DTensor:
    x = _make(size, {**options, "requires_grad": False}, lambda local: local)
    with torch.no_grad():
        draw(x)
    x.requires_grad_(options.get("requires_grad", False))
    return x


def _read(size: tuple, options: dict) -> tuple:
    known = {"dtype", "requires_grad", "device_mesh", "placements", "layout"}
    if not options.keys() <= known:
        raise TypeError(f"unknown options {sorted(options.keys() - known)}; known: {sorted(known)}")
    if options.get("layout", torch.strided) is not torch.strided:
        raise NotImplementedError(f"layout={options['layout']}: a DTensor is torch.strided.")
    size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    try:
        shape = torch.Size(size)
    except TypeError as error:
        raise TypeError(
            f"got size {size!r}; give the global shape, as ints or as one sequence of ints."
        ) from error
    if any(length < 0 for length in shape):
        raise ValueError(f"got size {tuple(shape)}, but no length of a shape may be negative.")
    mesh = options.get("device_mesh") or current_mesh()
    placements = normalize_placements(options.get("placements"), mesh, len(shape))
    check_fits_every_rank(mesh, placements, shape)
    dtype = options.get("dtype") or torch.get_default_dtype()
    return shape, mesh, placements, dtype, options.get("requires_grad", False)
