# SPDX-License-Identifier: Apache-2.0
"""AdamW with 8-bit moments, each block of a matrix with a scale of its own.

Ranks that hold whole blocks need nothing of each other: the result is that of one process, bit for
bit, and nothing is communicated.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from vescale.fsdp.arguments import check_bool
from vescale.fsdp.optim.adam import adamw_
from vescale.fsdp.optim.adamw8bit_parts import Part, batched, parts_of
from vescale.fsdp.optim.adamw8bit_state import (
    check_param,
    check_state,
    new_state,
    tiling_of,
)
from vescale.fsdp.optim.checks import (
    NAMED,
    check_betas,
    check_given,
    check_grad,
    check_group,
    check_integer,
    check_number,
    check_once,
    label_of,
)
from vescale.fsdp.optim.cuts import local_of
from vescale.fsdp.optim.restoring import load_uncast
from vescale.fsdp.optim.rounding import rounding_key
from vescale.fsdp.tiles import BlockSize, check_block


class AdamW8bit(Optimizer):
    """``torch.optim.AdamW`` with 8-bit state for matrices; parameters sharded in whole blocks.

    Which parameters get 8-bit state follows from the global shape alone: those of two dims and more
    and at least 4096 elements. The others, and groups with ``state_bits=32``, keep float32 state.
    Moments are stored after the update, which is computed in float32 from the unrounded ones. A
    positive second moment is never rounded to zero: a row that has no gradient for a while would
    else divide its first moment by ``eps``.

    Parameters are float32, bfloat16 or float16: plain tensors, or DTensors with RaggedShard or
    Shard(0) on one mesh axis and Replicate on the others, whose rank boundaries fall between
    blocks; ``fully_shard(granularity=granularity_for("adamw8bit"))`` makes them so. Any number of
    ranks then gets the same bits, and none communicates. A parameter without gradient is skipped.
    A NaN or infinity in a gradient makes the state of its whole block NaN.

    State, made at once, all plain tensors or DTensors, which torch.distributed.checkpoint reshards:
    ``step``; ``exp_avg_codes`` and ``exp_avg_sq_codes``, uint8 in the parameter's placement;
    ``exp_avg_scale`` and ``exp_avg_sq_scale``, float32, one for each block; or ``exp_avg`` and
    ``exp_avg_sq``, float32.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``. Groups may
            override each option.
        block: (rows, cols) of a tile; more than two dims count as one matrix (``Tiling``). Or the
            elements of a run of memory, such as 256.
        state_bits: 8, or 32 for float32 state.
        stochastic_round: round bfloat16 parameters up or down at random, so that the mean is kept.
        seed: of these roundings, which depend on it, on the step, on the parameter's name (its
            number where the optimizer was given no names) and on the element, not on the ranks.

    Raises:
        ValueError: an option is out of range, or a rank boundary cuts a block.
        NotImplementedError: a parameter has other placements.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block: BlockSize = (32, 32),
        state_bits: int = 8,
        stochastic_round: bool = False,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "block": block,
            "state_bits": state_bits,
            "stochastic_round": stochastic_round,
            "seed": seed,
            "maximize": maximize,
        }
        check_given(params, "AdamW8bit", NAMED)
        _check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and make its state. A group that is refused changes nothing."""
        check_group(param_group, "AdamW8bit", NAMED)
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        group = self.param_groups[index]
        try:  # only now are the parameters a list, and the names beside it
            check_once(group, index)
            for i, param in enumerate(group["params"]):
                check_param(param, group, label_of(group, index, i))
        except Exception:  # whatever it was: the optimizer stays as it has been
            self.param_groups.pop()
            raise
        for i, param in enumerate(group["params"]):
            self._renew(param, index, i)

    @torch.no_grad()
    def step(  # type: ignore[override]  # one signature for torch's two
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient; no communication."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for _, index, i in self._places():
            check_grad(self.param_groups[index], index, i)
        numbers = {param: number for number, (param, _, _) in enumerate(self._places())}
        for index, group in enumerate(self.param_groups):
            self._step_group(index, group, numbers)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as any optimizer does, but never cast codes, scales and moments.

        A state of ``torch.optim.AdamW`` loads too: its moments are quantized. A parameter that the
        state dict knows nothing of starts anew.

        Raises ValueError for state that does not fit the parameter or its group's options.
        """
        places = {param: (index, i) for param, index, i in self._places()}

        def restore(param: torch.Tensor, saved: dict[str, Any]) -> None:
            index, i = places[param]
            self.state[param] = check_state(param, saved, self.param_groups[index], index, i)

        load_uncast(self, state_dict, restore)
        for param, index, i in self._places():
            if param not in self.state:
                self._renew(param, index, i)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():  # torch.optim.AdamW knows only some
                group.setdefault(name, value)
            if group.get("amsgrad"):
                raise ValueError("a group has amsgrad=True, which AdamW8bit does not know.")
            _check_options(group)

    def _places(self) -> Iterable[tuple[torch.Tensor, int, int]]:
        """Yield each parameter, the index of its group and its index there."""
        for index, group in enumerate(self.param_groups):
            for i, param in enumerate(group["params"]):
                yield param, index, i

    def _renew(self, param: torch.Tensor, index: int, i: int) -> None:
        group = self.param_groups[index]
        label = label_of(group, index, i)
        self.state[param] = new_state(param, tiling_of(param, group), label)

    def _step_group(
        self, index: int, group: Mapping[str, Any], numbers: Mapping[torch.Tensor, int]
    ) -> None:
        by_step: dict[int, list[Part]] = {}
        copies = []
        for i, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            state = self.state[param]
            state["step"] += 1
            step, key = int(state["step"]), None
            if group["stochastic_round"] and param.dtype == torch.bfloat16:
                name = group["param_names"][i] if "param_names" in group else numbers[param]
                key = rounding_key(group["seed"], step, str(name))
            label = label_of(group, index, i)
            local = local_of(param)
            flat = local.contiguous().view(-1)
            if not local.is_contiguous():
                copies.append((local, flat))
            parts = parts_of(param, flat, state, tiling_of(param, group), key, label)
            by_step.setdefault(step, []).extend(parts)
        for step, listed in by_step.items():
            for batch in batched(listed):
                _update(batch, group, step)
        for local, flat in copies:
            local.copy_(flat.view(local.shape))
        # The updates went to local parts. Every rank counts them alike, whatever it holds.
        increment_version([param for param in group["params"] if param.grad is not None])


def _update(batch: list[Part], group: Mapping[str, Any], step: int) -> None:
    params, grads, exp_avgs, exp_avg_sqs = map(list, zip(*(p.read() for p in batch), strict=True))
    if group["maximize"]:
        grads = [-grad for grad in grads]
    adamw_(params, grads, exp_avgs, exp_avg_sqs, group, step)
    for part, param, *moments in zip(batch, params, exp_avgs, exp_avg_sqs, strict=True):
        part.write(param, moments)


def _check_options(group: Mapping[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        check_number(name, group[name])
    check_betas(group["betas"])
    if group["state_bits"] not in (8, 32):
        raise ValueError(f"state_bits={group['state_bits']}, expected 8, or 32 for float32 state.")
    check_block(group["block"])
    check_integer("seed", group["seed"])
    for name in ("stochastic_round", "maximize"):
        check_bool(name, group[name])
