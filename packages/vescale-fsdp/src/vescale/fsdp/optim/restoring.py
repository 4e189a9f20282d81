# SPDX-License-Identifier: Apache-2.0
"""Load an optimizer's state without casting it: torch would give codes the parameter's dtype."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

Restore = Callable[[torch.Tensor, dict[str, Any]], None]


def load_uncast(optimizer: Optimizer, state_dict: dict[str, Any], restore: Restore) -> None:
    """Do what ``Optimizer.load_state_dict`` does, but let ``restore`` take over the tensors.

    Groups are loaded, and hooks run, as torch does it; post hooks see what ``restore`` made.
    ``restore(param, saved)`` is called for each parameter of which ``state_dict`` holds state.
    """
    saved: dict[str, Any] = {}

    def withhold(
        _: Optimizer, final_state_dict: dict
    ) -> dict:  # registered last: sees what other hooks made of it
        saved.update(final_state_dict)
        ids = {i for group in saved["param_groups"] for i in group["params"]}
        others = {key: value for key, value in saved["state"].items() if key not in ids}
        return {**final_state_dict, "state": others}

    def hand_over(_: Optimizer) -> None:
        ids = (i for group in saved["param_groups"] for i in group["params"])
        params = (p for group in optimizer.param_groups for p in group["params"])
        for saved_id, param in zip(ids, params, strict=True):
            if saved["state"].get(saved_id):
                restore(param, saved["state"][saved_id])

    hooks = (
        optimizer.register_load_state_dict_pre_hook(withhold),
        optimizer.register_load_state_dict_post_hook(hand_over, prepend=True),
    )
    try:
        Optimizer.load_state_dict(optimizer, state_dict)
    finally:
        for hook in hooks:
            hook.remove()
