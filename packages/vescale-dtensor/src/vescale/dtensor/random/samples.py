# SPDX-License-Identifier: Apache-2.0
"""Let plain tensors of data parallel ranks draw what one device draws for all of them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor._torch_compat import TorchDispatchMode
from vescale.dtensor.random.batch import Batch, activate
from vescale.dtensor.random.operators import FACTORIES, HANDLERS

DROPOUT = ("dropout_p", "dropout")  # what operators call it that may draw


def scope(
    mesh: DeviceMesh, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> AbstractContextManager:
    """Return a context in which a plain tensor is this rank's part of a batch, cut along ``dim``.

    Random operators on it, dropout above all, then draw this rank's part of what one device draws
    for the batch of all ranks of ``mesh``, and the generators of all ranks end as that device's. It
    is for data parallelism on plain tensors, as under ``fully_shard``; seed all ranks alike. Ranks
    follow each other in the order of ``mesh``, all its axes. A DTensor, of another mesh, draws its
    part of the part, so tensor parallelism within data parallel ranks works too.

    ``sizes`` are the numbers of samples of the ranks, where they are not equal; without it, shapes
    must be equal on all ranks. A tensor whose ``dim`` has several indices for each sample, such as
    one of samples times heads, is cut between samples. One that lacks ``dim`` draws alike on all
    ranks. Backward goes inside the context too where it runs layers once more.

    Fills follow the order of dims in memory. Torch loses track of it for a dim of one element, so
    where ranks have one sample each, a model that swaps the samples with another dim, and does not
    copy, may draw otherwise than one device.

    No communication. On the CPU a rank takes the time of one device to draw; see ``set_mode``.
    Every operator inside costs some microseconds more; keep compiled functions outside. Raises
    ValueError for a mesh or sizes that do not fit, and, of a random operator, for a tensor whose
    ``dim`` is no multiple of this rank's samples; NotImplementedError for random operators that it
    does not know, such as ``randperm``, and for ragged tensors.
    """
    return _Scope(_batch_of(mesh, dim, sizes))


class _Scope(TorchDispatchMode):
    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self._batch = batch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        handler = FACTORIES.get(func) or HANDLERS.get(func)
        if handler is None:
            _check_draws_nothing(func, args, kwargs)
            return func(*args, **kwargs)
        with activate(self._batch):
            return handler(func, args, kwargs)


def _batch_of(mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None) -> Batch:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"scope got mesh={mesh!r}, expected the DeviceMesh of data parallelism.")
    if type(dim) is not int or dim < 0:
        raise ValueError(f"scope got dim={dim!r}; give the dim of the samples, counted from 0.")
    ranks = mesh.size()
    sizes = [1] * ranks if sizes is None else list(sizes)
    if len(sizes) != ranks or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(
            f"scope got sizes={sizes} for {mesh}; give each of its {ranks} ranks a number of "
            "samples, at least one: a rank without any does not draw, and falls behind."
        )
    places = (mesh.mesh.flatten() == mesh.get_rank()).nonzero().flatten().tolist()
    if not places:
        raise ValueError(f"scope got {mesh}, which this rank {mesh.get_rank()} is not in.")
    return Batch(dim, sum(sizes[: places[0]]), sizes[places[0]], sum(sizes))


def _check_draws_nothing(func: Any, args: tuple, kwargs: dict) -> None:
    """Raise, unless ``func`` has a probability of dropout that is zero."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False), **kwargs)
    if any(name in DROPOUT for name in names) and not any(given.get(name) for name in DROPOUT):
        return
    raise NotImplementedError(
        f"{func} draws random numbers, and random.scope() cannot draw this rank's part of them; "
        "call it outside of the scope, or build it from rand, randn, randint, bernoulli or dropout."
    )
