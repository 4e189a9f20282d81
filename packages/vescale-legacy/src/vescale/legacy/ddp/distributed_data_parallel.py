# SPDX-License-Identifier: Apache-2.0
"""``DistributedDataParallel``: gradients in flat buffers, averaged over data parallel ranks."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.legacy._errors import LegacyValueError
from vescale.legacy.ddp.grad_buffer import Bucket, GradBuffer, local_of

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module):
    """Wrap a module so that backward leaves gradients in ``parameter.main_grad``, ``.grad`` None.

    ``data_pg_or_device_mesh`` is the data parallel group, or a mesh whose dim 0 it is. The module
    may be a DModule: its parameters take part by their local parts, and gradients that are partial
    over tensor parallel ranks are reduced there first.

    ``accumulate_allreduce_grads_in_fp32``: buffers are fp32, else of the parameters' dtype.
    ``overlap_grad_reduce``: buckets start when their gradients are there, in one fixed order.
    ``use_distributed_optimizer``: each rank gets the mean of its own part only.
    ``bucket_size``: elements; ``disable_bucketing``: one bucket. ``module_to_enforce``: classes
    whose parameters may lack a gradient without a warning. ``param_to_ignore``: names that have
    a ``main_grad`` but are not reduced. Other keywords are ignored.

    Call ``finish_grad_sync()`` after backward, and ``zero_grad_buffer()`` before the next one.
    """

    def __init__(
        self,
        module: nn.Module,
        data_pg_or_device_mesh: dist.ProcessGroup | DeviceMesh,
        accumulate_allreduce_grads_in_fp32: bool = True,
        overlap_grad_reduce: bool = True,
        use_distributed_optimizer: bool = False,
        disable_bucketing: bool = False,
        bucket_size: int = 40000000,
        module_to_enforce: Sequence[type[nn.Module]] | None = None,
        param_to_ignore: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.data_parallel_group = _group(data_pg_or_device_mesh)
        self.data_parallel_world_size = self.data_parallel_group.size()
        self.data_parallel_ranks = dist.get_process_group_ranks(self.data_parallel_group)
        self.overlap_grad_reduce = overlap_grad_reduce
        self.use_distributed_optimizer = use_distributed_optimizer
        bucketing = overlap_grad_reduce and not disable_bucketing
        self.bucket_size = bucket_size if bucketing else None
        self._sparse = _parameters_of(module, module_to_enforce or ())
        by_dtype, ignored = _sorted(module, param_to_ignore, accumulate_allreduce_grads_in_fp32)
        self.grad_buffers: dict[torch.dtype, GradBuffer] = {
            dtype: GradBuffer(
                parameters,
                dtype,
                self.data_parallel_group,
                self.bucket_size,
                use_distributed_optimizer,
            )
            for dtype, parameters in by_dtype.items()
        }
        self._bucket_of = {
            parameter: bucket
            for buffer in self.grad_buffers.values()
            for bucket in buffer.buckets
            for parameter in bucket.parameters
        }
        self._buckets = self._in_order()
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._collect)
        self._ignored = ignored
        other: Any
        for other, dtype in ignored:
            other.main_grad = torch.zeros_like(local_of(other), dtype=dtype)
            other.register_post_accumulate_grad_hook(_keep)

    @property
    def grad_buffer_param_index_map(self) -> dict[torch.dtype, dict[nn.Parameter, tuple]]:
        """``{dtype: {parameter: (start, end, number of its bucket)}}``."""
        return {dtype: buffer.index_map() for dtype, buffer in self.grad_buffers.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def start_grad_sync(self) -> None:
        """Start reducing what has not started, in the order of buckets."""
        for bucket in self._buckets:
            if not bucket.started:
                bucket.start()

    def finish_grad_sync(self) -> None:
        """Wait until each ``main_grad`` holds the mean over the data parallel ranks.

        A parameter without a gradient counts as zero, with a ``UserWarning`` when the reduction
        was to overlap. With ``use_distributed_optimizer`` only this rank's parts are valid.
        """
        if self.overlap_grad_reduce:
            self._warn_of_missing()
        self.start_grad_sync()
        for bucket in self._buckets:
            bucket.finish()

    def zero_grad_buffer(self, zero_buffer: bool = True) -> None:
        """Be ready for the next backward; with ``zero_buffer`` gradients are zero again."""
        for bucket in self._buckets:
            if bucket.started:
                bucket.finish()
            bucket.reset()
        if zero_buffer:
            for buffer in self.grad_buffers.values():
                buffer.data.zero_()
            parameter: Any
            for parameter, _ in self._ignored:
                parameter.main_grad.zero_()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Return the same as ``state_dict``."""
        return self.state_dict(*args, **kwargs)

    def load_state_dict(  # type: ignore[override]  # as the old one: assign= is not there
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Any:
        """Load the state of the module."""
        return self.module.load_state_dict(state_dict, strict=strict)

    def _in_order(self) -> list[Bucket]:
        """Return all buckets in the order in which backward completes them, one for all ranks."""
        place = {parameter: i for i, parameter in enumerate(self.module.parameters())}
        buckets = [bucket for buffer in self.grad_buffers.values() for bucket in buffer.buckets]
        return sorted(buckets, key=lambda b: -min(place[p] for p in b.parameters))

    def _collect(self, parameter: nn.Parameter) -> None:
        self._bucket_of[parameter].add(parameter, once=self.overlap_grad_reduce)
        if self.overlap_grad_reduce:
            # Never out of order: ranks may differ in which parameters they used.
            for bucket in self._buckets:
                if not bucket.started:
                    if not bucket.complete:
                        break
                    bucket.start()

    def _warn_of_missing(self) -> None:
        missing = {
            parameter
            for bucket in self._buckets
            if not bucket.started
            for parameter in bucket.parameters
            if parameter not in bucket.arrived and parameter not in self._sparse
        }
        if missing:
            names = [name for name, p in self.module.named_parameters() if p in missing]
            warnings.warn(
                f"no gradient arrived for {names}; taken as zero, and reduced without overlap.",
                stacklevel=3,
            )


def _group(given: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if isinstance(given, DeviceMesh):
        return given.get_group(0)
    if isinstance(given, dist.ProcessGroup):
        return given
    raise LegacyValueError(
        f"data_pg_or_device_mesh={given!r}: expected a ProcessGroup, or a DeviceMesh whose dim 0 "
        "is data parallel."
    )


def _parameters_of(module: nn.Module, classes: Sequence[type[nn.Module]]) -> set[nn.Parameter]:
    return {
        parameter
        for submodule in module.modules()
        if isinstance(submodule, tuple(classes))
        for parameter in submodule.parameters()
    }


def _sorted(
    module: nn.Module, ignore: Sequence[str] | None, in_fp32: bool
) -> tuple[dict[torch.dtype, list[nn.Parameter]], list[tuple[nn.Parameter, torch.dtype]]]:
    """Return the trained parameters by the dtype of their gradients, and the ignored ones."""
    names = dict(module.named_parameters())
    if unknown := set(ignore or ()) - set(names):
        raise LegacyValueError(f"param_to_ignore names {sorted(unknown)}, which are no parameters.")
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    ignored = []
    for name, parameter in names.items():
        if not parameter.requires_grad:
            continue
        dtype = torch.float32 if in_fp32 else parameter.dtype
        if name in (ignore or ()):
            ignored.append((parameter, dtype))
        else:
            by_dtype.setdefault(dtype, []).append(parameter)
    return by_dtype, ignored


def _keep(parameter: Any) -> None:
    parameter.main_grad.add_(local_of(parameter.grad))
    parameter.grad = None
