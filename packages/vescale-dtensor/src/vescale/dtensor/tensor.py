# SPDX-License-Identifier: Apache-2.0
"""torch's DTensor with one more placement: RaggedShard.

The local tensor of a ragged DTensor is flat, ``[numel of this rank]``, and may be a view of a
larger buffer. Its global shape, strides and dtype are stored, never guessed from the local part.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from vescale.dtensor import autograd, checkpoint
from vescale.dtensor._torch_compat import (
    DTensorSpec,
    TorchDTensor,
    current_mesh,
    from_local,
    replace_tensor_impl,
    wrap,
)
from vescale.dtensor.ops.dispatch import dispatch
from vescale.dtensor.spec import (
    check_fits_every_rank,
    check_is_ours,
    check_local_shape,
    layout_of,
    normalize_placements,
    ragged_axis,
    ragged_spec,
    spec_with_dtype,
    without_caches,
)
from vescale.dtensor.waiting import WaitingTensor, settled

__all__ = ["DTensor", "adopt", "local_of", "make_ragged", "ragged_spec", "set_local"]


class DTensor(TorchDTensor):
    """torch's DTensor, which may also be laid out by a RaggedShard.

    Plain placements are handed to torch's own code; results are of this class. Build one with
    ``distribute_tensor``, ``DTensor.from_local`` or the factory functions; the constructor takes
    a local tensor and a spec that fits it, and is for library code.
    """

    def __init__(
        self, local_tensor: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool
    ) -> None:
        layout = layout_of(spec)
        if layout is not None and local_tensor.shape != (layout.numel,):
            raise ValueError(
                f"the local tensor has shape {tuple(local_tensor.shape)}, but {spec.placements} "
                f"gives this rank {layout.numel} elements of {tuple(self.shape)}; "
                "pass them as one flat tensor."
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return (
            f"DTensor(shape={tuple(self.shape)}, local={self._local_tensor}, "
            f"device_mesh={self._spec.mesh}, placements={self._spec.placements})"
        )

    __torch_dispatch__: Any = classmethod(dispatch)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> "DTensor":
        x = TorchDTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        return _as_ours(x)

    def __getstate__(self) -> tuple[dict, dict]:
        # What a spec caches is derived, and no safe global of torch.load.
        spec = without_caches(self._spec)
        return self.__dict__, {"_local_tensor": settled(self._local_tensor), "_spec": spec}

    def data_ptr(self) -> int:
        """Return 0: a DTensor has no memory of its own, ``to_local()`` has.

        torch's own answer tells the offset of the local tensor in its buffer, which the stager of
        ``async_save`` takes for memory of the wrapper. As it asks before it copies, values that
        are under way are waited for.
        """
        self._local_tensor = settled(self._local_tensor)
        return 0

    def __deepcopy__(self, memo: dict) -> "DTensor":
        # torch's own looks for a storage, and finds none behind a view of a buffer.
        if not self.is_leaf:
            raise RuntimeError(
                "only a DTensor made by the user can be deep-copied, not the result of an "
                "operation that autograd recorded; detach() it first."
            )
        with torch.no_grad():
            out = wrap(
                type(self),
                self._local_tensor.clone(),
                self._spec,
                requires_grad=self.requires_grad,
            )
        memo[id(self)] = out
        if self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        out.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return out

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> "DTensor":
        """Wrap each rank's part as one DTensor, without communication; differentiable.

        For a ragged placement the part is flat, or a block ``[rows, *shape[k:]]``; the result is
        a view of it where it is contiguous. ``shape`` is the global shape. It may be left out
        when every rank alike can derive it: the part is a block of two dims or more, the placement
        cuts dim 0 only, no unit is zero, and the other axes replicate. ``run_check=True`` copies
        rank 0's data over every axis that replicates.

        Raises ValueError when the part does not fit, or ``shape`` is needed.
        """
        if not isinstance(local_tensor, torch.Tensor):
            raise TypeError(
                f"from_local got a {type(local_tensor).__name__}; make a tensor of it first, as "
                "with torch.tensor()."
            )
        mesh = device_mesh or current_mesh()
        ndim = len(shape) if shape is not None else local_tensor.ndim
        placements = normalize_placements(placements, mesh, ndim)
        if ragged_axis(placements) is None:
            if shape is not None:
                check_local_shape(local_tensor, mesh, placements, shape)
            plain = from_local(
                local_tensor,
                mesh,
                placements,
                run_check=run_check,
                shape=None if shape is None else torch.Size(shape),
                stride=stride,
                grad_placements=grad_placements,
            )
            return autograd.FromTorch.apply(plain, DTensor)
        return autograd.from_local_ragged(
            DTensor, local_tensor, mesh, placements, run_check, shape, stride, grad_placements
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's part, a view; flat for a ragged placement. Differentiable.

        As on torch 2.13 the part of an ``nn.Parameter`` is an ``nn.Parameter``.
        """
        if grad_placements is not None:
            grad_placements = normalize_placements(grad_placements, self._spec.mesh, self.ndim)
        local = self._local_tensor
        if type(local) is WaitingTensor:
            local = self._local_tensor = local.wait()
        if torch.is_grad_enabled():  # a new object: autograd writes its metadata into it
            if self.requires_grad:
                local = autograd.ToLocal.apply(self, grad_placements)
            else:
                local = local.view_as(local)
        if getattr(self, "_is_param", False) and not getattr(local, "_is_param", False):
            local = local.view_as(local) if local is self._local_tensor else local
            local._is_param = True
        return local

    def local_block(self) -> torch.Tensor:
        """Return this rank's part as ``[rows, *shape[k:]]``, a view. Differentiable.

        For ``dims=()`` it is the whole tensor on its owner, and has no rows elsewhere. On meshes
        of several axes ``shape`` is what the other placements leave. For plain placements it is
        ``to_local()``.
        """
        layout = layout_of(self._spec)
        return self.to_local() if layout is None else self.to_local().view(layout.block_shape)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> "DTensor":
        """Return the same tensor in other placements; differentiable, collective.

        ``forward_dtype`` is the dtype of the collective and of the result; ``backward_dtype``
        that of the collective in the backward pass, whose result has this tensor's dtype.
        The backward of a move is the move back; the gradient of a Partial is Replicate.

        With ``async_op=True`` the collective has only begun; the first use of the result's
        values, ``to_local()`` included, waits for it. This tensor must not change before.

        Raises NotImplementedError for another mesh, and for ``async_op=True`` when the move takes
        several dependent steps; ValueError, RuntimeError and NotImplementedError for moves that
        do not exist, before any collective.
        """
        mesh = self._spec.mesh
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            normalize_placements(None, device_mesh, self.ndim)  # raises
        if placements is None:
            raise ValueError("redistribute() needs placements, one per mesh axis.")
        if device_mesh is not None and device_mesh != mesh:
            raise NotImplementedError(
                f"cannot redistribute from {mesh} to another mesh, {device_mesh}; use "
                "full_tensor() and distribute_tensor()."
            )
        for name, dtype in (("forward_dtype", forward_dtype), ("backward_dtype", backward_dtype)):
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"redistribute() got {name}={dtype!r}; give a torch.dtype or None.")
        target = normalize_placements(placements, mesh, self.ndim)
        if layout_of(self._spec) is None and ragged_axis(target) is None:
            moved = self.as_torch().redistribute(
                mesh,
                target,
                async_op=async_op,
                forward_dtype=forward_dtype,
                backward_dtype=backward_dtype,
            )
            return autograd.FromTorch.apply(moved, type(self))
        if target != self._spec.placements:  # those it has may differ between ranks
            check_fits_every_rank(mesh, target, self.shape)
        return autograd.Redistribute.apply(self, target, forward_dtype, backward_dtype, async_op)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor on every rank; differentiable, collective."""
        everywhere = self.redistribute(placements=(Replicate(),) * self._spec.mesh.ndim)
        return everywhere.to_local(grad_placements=grad_placements)

    def as_torch(self) -> TorchDTensor:
        """Return torch's own DTensor over the same local data, for code that needs that type.

        Differentiable. Raises NotImplementedError for a ragged placement.
        """
        if layout_of(self._spec) is not None:
            raise NotImplementedError(
                f"torch's DTensor does not know {self._spec.placements}; redistribute to Shard "
                "or Replicate first."
            )
        if torch.is_grad_enabled() and self.requires_grad:
            return autograd.AsTorch.apply(self)
        local = autograd.without_grad(self._local_tensor)
        return wrap(TorchDTensor, local, self._spec, requires_grad=False)

    def __create_write_items__(self, fqn: str, object: object) -> list:
        if layout_of(self._spec) is None:
            return super().__create_write_items__(fqn, object)
        return checkpoint.write_items(fqn, self)

    def __create_chunk_list__(self) -> list:
        if layout_of(self._spec) is None:
            return super().__create_chunk_list__()
        return checkpoint.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        if layout_of(self._spec) is None:
            return super().__get_tensor_shard__(index)
        return checkpoint.tensor_shard(self, index)


def adopt(x: torch.Tensor) -> DTensor:
    """Return torch's own DTensor ``x`` as our class, over the same local tensor; not recorded
    by autograd.

    Raises NotImplementedError when it is ragged: torch's own functions do not cut it so.
    """
    if isinstance(x, DTensor):
        return x
    check_is_ours(x)
    return _as_ours(x)


def _as_ours(x: Any) -> DTensor:
    local = autograd.without_grad(x._local_tensor)
    return wrap(DTensor, local, x._spec, requires_grad=x.requires_grad)


def make_ragged(
    local_flat: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False
) -> DTensor:
    """Wrap ``local_flat`` (not copied, not checked) by a spec from ``ragged_spec``.

    ``local_flat`` is ``[numel of this rank]`` and has the dtype of the spec.
    """
    return wrap(DTensor, local_flat, spec, requires_grad=requires_grad)


def local_of(dtensor: torch.Tensor) -> torch.Tensor:
    """Return the very tensor that a DTensor holds: no view of it, and nothing recorded."""
    return dtensor._local_tensor  # type: ignore[attr-defined]  # a Parameter may be a DTensor


def set_local(dtensor: Any, local_flat: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor, in place: the Python object stays the same.

    Its dtype and device follow ``local_flat``; placements and global shape stay. Hooks,
    ``requires_grad`` and being an ``nn.Parameter`` stay as well; ``.grad`` is dropped when the
    dtype or the device changes. Other references, strong and weak, see the change.

    Raises RuntimeError when the tensor moves from or to the meta device while an autograd graph
    holds it, ValueError when the number of elements is wrong.
    """
    old, spec = dtensor._local_tensor, dtensor._spec
    if local_flat.shape != old.shape:
        raise ValueError(
            f"set_local got a local tensor of shape {tuple(local_flat.shape)} for one of "
            f"{tuple(old.shape)}; the layout {spec.placements} stays, so the length must too."
        )
    if local_flat.dtype != spec.tensor_meta.dtype:
        spec = spec_with_dtype(spec, local_flat.dtype)
    if local_flat.dtype != old.dtype or local_flat.device != old.device:
        dtensor.grad = None
        fresh = wrap(DTensor, local_flat, spec, requires_grad=dtensor.requires_grad)
        if local_flat.is_meta == old.is_meta:
            dtensor.data = fresh
        else:  # torch's .data assignment refuses to leave or enter meta
            replace_tensor_impl(dtensor, fresh)
    dtensor._local_tensor, dtensor._spec = local_flat, spec
