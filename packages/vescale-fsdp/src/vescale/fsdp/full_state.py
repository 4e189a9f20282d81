# SPDX-License-Identifier: Apache-2.0
"""Load whole tensors into a model, however it is sharded, one tensor at a time."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from vescale.fsdp.arguments import check_bool
from vescale.fsdp.state_dict.loading import LoadedKeys, load_model

__all__ = ["LoadedKeys", "load_full_state_dict"]


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    from_rank0: bool = True,
    strict: bool = True,
) -> LoadedKeys:
    """Copy whole tensors into ``model``'s parameters and buffers, in place.

    With ``from_rank0`` only global rank 0 needs ``state_dict``, and tensors are broadcast one by
    one; else every rank passes its own, and none travels. Beside its shards a rank needs memory
    for the largest tensor. ``model`` is wrapped or not, on the meta device or not.

    - Keys are those of ``model.state_dict()`` before wrapping. The names that ``torch.compile``,
      ``checkpoint_wrapper`` and DDP (``module.``) add are ignored.
    - A tied parameter is found under any of its names. Given under several, all must be equal.
    - Buffers are loaded too. Those with ``persistent=False`` may be missing, and then stay.
    - Values take the dtype of their targets; a float never becomes an integer.

    With ``strict=False`` keys may be missing or unknown; both are returned. Hooks that rename
    keys while a state dict is loaded do not run.

    Collective over the default process group. Raises on all ranks alike, before anything is
    changed: ValueError for keys and shapes that do not match, which it names, and for tensors on
    the meta device that the state does not have; TypeError or ValueError for a state that is no
    dict or gives a tie two values (RuntimeError with that message on ranks that cannot see it).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module.")
    check_bool("from_rank0", from_rank0)
    check_bool("strict", strict)
    _check_group()
    return load_model(model, state_dict, src=0 if from_rank0 else None, strict=strict)


def _check_group() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "load_full_state_dict needs a process group and there is none; for one process use "
            "model.load_state_dict(), or call torch.distributed.init_process_group() first."
        )
