# SPDX-License-Identifier: Apache-2.0
"""Fill a DTensor in place with what one device would draw, on the CPU or another device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.layout import contiguous_stride
from vescale.dtensor.random import batch, cpu, cuda
from vescale.dtensor.random.parts import Strip, memory_order, strips_of


def fill(
    func: Any, x: torch.Tensor, args: Sequence[object], generator: torch.Generator | None = None
) -> None:
    """Call the in-place random operator ``func`` on a DTensor ``x`` as if it were a plain tensor.

    While a batch is active, ``x`` is this rank's samples of it, and may be a plain tensor.

    Writes this rank's part only, without communication; the generator ends where the call on the
    whole tensor leaves it, on ranks outside of the mesh too. Raises NotImplementedError for Partial
    values, and for a DTensor among ``args``.
    """
    samples = batch.active()
    if samples is not None and x.ndim > samples.dim:
        _fill_samples(func, x, args, generator, samples)
        return
    if not isinstance(x, TorchDTensor):  # of a scope, but none of its samples
        func(x, *args, generator=generator)
        return
    spec, local = x._spec, x._local_tensor
    if any(isinstance(a, TorchDTensor) for a in args):
        raise NotImplementedError(
            f"{func} on {spec.placements} with a DTensor as its parameter: only numbers and plain "
            "tensors, alike on all ranks, parametrise a fill; pass its full_tensor(), or "
            "redistribute both to Replicate."
        )
    if local.is_meta:
        return
    coordinate = spec.mesh.get_coordinate()
    if coordinate is not None and all(p.is_replicate() for p in spec.placements):
        func(local, *args, generator=generator)
        return
    shape, stride = tuple(spec.tensor_meta.shape), tuple(spec.tensor_meta.stride)
    order = memory_order(shape, stride)
    strips = strips_of(shape, spec.placements, spec.mesh.shape, coordinate, order)
    _fill_local(func, args, shape, stride, order, strips, local, generator)


def _fill_samples(
    func: Any,
    x: torch.Tensor,
    args: Sequence[object],
    generator: torch.Generator | None,
    samples: batch.Batch,
) -> None:
    if any(isinstance(a, torch.Tensor) and a.ndim for a in args):
        raise NotImplementedError(
            f"{func} inside random.scope() with a tensor as its parameter; leave the scope for it."
        )
    local: torch.Tensor = x
    placements: tuple[Placement, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    coordinate: tuple[int, ...] = ()
    if isinstance(x, TorchDTensor):
        local, placements, mesh = x._local_tensor, x._spec.placements, x._spec.mesh
        mesh_shape, coordinate = mesh.shape, mesh.get_coordinate()
    if local.is_meta:
        return
    whole, stride, order = samples.whole(x.shape, x.stride())
    strips = samples.strips(whole, x.shape, order, placements, mesh_shape, coordinate)
    if local is x and not x.permute(order).is_contiguous():  # nor is that of one device
        stride = tuple(2 * step for step in stride)
    _fill_local(func, args, whole, stride, order, strips, local, generator)


def advance(
    func: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    args: Sequence[object],
    generator: torch.Generator | None,
) -> None:
    """Move the generator as ``func`` on a row-major tensor of ``shape`` does."""
    shape = tuple(shape)
    nothing = torch.empty(0, dtype=dtype, device=device)
    _fill_flat(func, args, shape, contiguous_stride(shape), None, [], nothing, generator)


def _fill_local(
    func: Any,
    args: Sequence[object],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    order: list[int] | None,
    strips: Sequence[Strip],
    local: torch.Tensor,
    generator: torch.Generator | None,
) -> None:
    """Write ``strips`` of a tensor of ``shape`` and ``stride`` into ``local``, which has them."""
    ordered = local if order is None or not strips else local.permute(order)
    flat = ordered
    if not ordered.is_contiguous():
        flat = torch.empty(ordered.shape, dtype=local.dtype, device=local.device)
    _fill_flat(func, args, shape, stride, order, strips, flat.view(-1), generator)
    if flat is not ordered:
        ordered.copy_(flat)


def _fill_flat(
    func: Any,
    args: Sequence[object],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    order: list[int] | None,
    strips: Sequence[Strip],
    flat: torch.Tensor,
    generator: torch.Generator | None,
) -> None:
    numel = torch.Size(shape).numel()
    numbers = not any(isinstance(a, torch.Tensor) for a in args)
    if numbers and flat.device.type == "cpu":
        contiguous = _is_contiguous(shape, stride)
        cpu.fill_part(func, args, numel, strips, flat, generator, contiguous)
    elif numbers and cuda.serves(func, flat, numel):
        cuda.fill_part(func, args, numel, strips, flat, generator)
    else:  # draw all, keep the part
        whole = torch.empty_strided(shape, stride, dtype=flat.dtype, device=flat.device)
        func(whole, *args, generator=generator)
        ordered = whole if order is None else whole.permute(order)
        cpu.take_part(ordered.reshape(-1), strips, flat)


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = contiguous_stride(shape)
    return all(
        length <= 1 or mine == its
        for length, mine, its in zip(shape, stride, expected, strict=True)
    )
