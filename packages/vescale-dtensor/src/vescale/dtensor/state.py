# SPDX-License-Identifier: Apache-2.0
"""Whole tensors out of a sharded state dict, and back in, one at a time.

torch's helpers for full state dicts call its own ``distribute_tensor``, which does not know
ragged placements and offers no hook for them. A state is any nesting of dicts and lists, as
``state_dict()`` of a module or of an optimizer gives it, or torch's ``get_model_state_dict`` and
``get_optimizer_state_dict``: fill what they return, and hand it to their ``set_`` twins.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.checkpoint import check_not_partial
from vescale.dtensor.matching import fill, leaves, match_full_state, name_of
from vescale.dtensor.placement import RaggedShard
from vescale.dtensor.spec import check_is_ours
from vescale.dtensor.tensor import adopt

__all__ = ["fill", "full_state_dict", "load_full_state_dict", "match_full_state"]


def full_state_dict(
    state: dict[str, Any], *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, Any]:
    """Return ``state`` with whole, detached tensors in place of DTensors.

    Collective over every DTensor's mesh; all ranks pass the same keys in the same order. With
    ``rank0_only=True`` only global rank 0 returns the state, every other rank an empty dict, and
    a tensor on a mesh of one axis travels to that rank alone. With ``cpu_offload=True`` tensors
    move to the CPU one by one, so a device holds no more than one whole tensor at a time. Tensors
    that were whole already are not copied. One that is there under several keys, as tied
    parameters are, travels once and stays one tensor.

    Raises, before any collective, ValueError for a DTensor that is Partial, NotImplementedError
    for a ragged one of torch's own class, TypeError when ``state`` is no dict.
    """
    _check_is_dict("full_state_dict", state)
    for path, x in leaves(state):
        if isinstance(x, TorchDTensor):
            check_not_partial(name_of(path), x)
            check_is_ours(x)
    keep = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    wholes: dict[int, torch.Tensor | None] = {}

    def whole(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x if keep else None
        if id(x) not in wholes:  # ``state`` keeps x, so its id stays its own
            wholes[id(x)] = _whole(x, rank0_only, cpu_offload)
        return wholes[id(x)]

    full = _map(whole, state)
    return full if keep else {}


def load_full_state_dict(
    target_state: dict[str, Any], full_state: dict[str, Any] | None, *, src: int | None = 0
) -> None:
    """Fill the tensors of ``target_state`` in place from whole ones that only rank ``src`` has.

    ``target_state`` holds DTensors of any placement, plain tensors and other values, the same
    keys on all ranks of the default group; ``full_state`` counts on global rank ``src`` only, and
    holds plain tensors, on any device. They are broadcast one at a time: a rank needs, beside its
    parts, the memory of the largest. With ``src=None`` every rank has a full state of its own,
    and nothing is broadcast. Values that are no tensors are replaced, in dicts and lists. Dtypes
    become those of the targets.

    Raises ValueError on all ranks, before any tensor is changed, when keys or shapes differ, a
    dtype cannot become the target's (float to integer), or a target is Partial, on meta, or a
    ragged tensor of torch's own class.
    """
    _check_is_dict("load_full_state_dict", target_state)
    match_full_state(target_state, full_state, src=src).copy_into(target_state)


def _check_is_dict(name: str, state: object) -> None:
    if not isinstance(state, dict):
        raise TypeError(
            f"{name} got a {type(state).__name__}; pass a dict, such as model.state_dict() or "
            "optimizer.state_dict()."
        )


def _whole(x: torch.Tensor, rank0_only: bool, cpu_offload: bool) -> torch.Tensor | None:
    """Return ``x`` whole, or None where only rank 0 is to have it."""
    keep = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    if isinstance(x, TorchDTensor):
        whole = _on_rank0(x) if rank0_only else adopt(x.detach()).full_tensor()
    else:
        whole = x
    if not keep or whole is None:
        return None
    return whole.detach().cpu() if cpu_offload else whole.detach()


def _on_rank0(x: TorchDTensor) -> torch.Tensor | None:
    """Return the whole tensor on global rank 0; anything elsewhere."""
    mesh, ranks = x.device_mesh, x.device_mesh.mesh.flatten().tolist()
    if 0 not in ranks:
        return None
    x = adopt(x.detach())
    if mesh.ndim == 1 and isinstance(x.placements[0], Shard | RaggedShard):
        place = ranks.index(0)
        owner = RaggedShard.from_runs((), ((0, place), (1, 1), (0, len(ranks) - place - 1)))
        return x.redistribute(placements=[owner]).local_block()
    return x.full_tensor()


def _map(function: Callable[[Any], Any], state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _map(function, value) for key, value in state.items()}
    if isinstance(state, list):
        return [_map(function, value) for value in state]
    return function(state)
