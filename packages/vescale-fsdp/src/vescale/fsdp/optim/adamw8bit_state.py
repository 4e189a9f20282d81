# SPDX-License-Identifier: Apache-2.0
"""What AdamW8bit stores of each parameter, how that is placed, and whether it fits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate

from vescale.dtensor import DTensor, RaggedShard
from vescale.fsdp.optim.checks import check_memory, check_placed, check_same_layout, label_of
from vescale.fsdp.optim.codebooks import zero_code
from vescale.fsdp.optim.cuts import local_of, read_cut
from vescale.fsdp.optim.quantize import encode
from vescale.fsdp.tiles import Tiling, deserves_blocks

FLOAT_STATE = ("exp_avg", "exp_avg_sq")
CODES = ("exp_avg_codes", "exp_avg_sq_codes")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
SIGNED = (True, False)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tiling_of(param: torch.Tensor, group: Mapping[str, Any]) -> Tiling | None:
    """Return the blocks of a parameter's 8-bit state, or None for float32 state.

    Looks at the global shape and at the group's options only, never at a shard.
    """
    if group["state_bits"] == 32 or not deserves_blocks(param.shape):
        return None
    return Tiling(tuple(param.shape), group["block"])


def check_param(param: Any, group: Mapping[str, Any], label: str) -> None:
    """Raise for what AdamW8bit cannot optimize, on every rank alike."""
    if param.dtype not in DTYPES:
        raise ValueError(f"{label} is {param.dtype}, expected one of {DTYPES}.")
    if group["stochastic_round"] and param.dtype == torch.float16:
        raise ValueError(f"{label} is float16, but stochastic_round=True is for bfloat16.")
    check_memory(param, label)
    cut, tiling = read_cut(param, label), tiling_of(param, group)
    if cut is None or tiling is None or tiling.fits(cut.runs):
        return
    what = f"blocks of {tiling.block} elements"
    if isinstance(tiling.block, tuple):
        what = "tiles of {} x {}".format(*tiling.block)
    raise ValueError(
        f"{label} has shape {tuple(param.shape)} and placements {tuple(param.placements)}, whose "
        f"rank boundaries cut {what}. Shard it with fully_shard(..., granularity="
        f"{tiling.granularity}), or granularity_for('adamw8bit') for all; or put it into a group "
        "with state_bits=32."
    )


def new_state(param: torch.Tensor, tiling: Tiling | None, label: str) -> dict[str, Any]:
    """Return the state of a parameter that has taken no step."""
    state = {"step": torch.tensor(0.0)}
    if tiling is None:
        state |= {name: _zeros(param, torch.float32) for name in FLOAT_STATE}
        return state
    for name, signed in zip(CODES, SIGNED, strict=True):
        state[name] = _zeros(param, torch.uint8)
        local_of(state[name]).fill_(zero_code(signed))
    state |= {name: _scale(param, tiling, label) for name in SCALES}
    return state


def check_state(
    param: torch.Tensor,
    saved: dict[str, Any],
    group: Mapping[str, Any],
    group_index: int,
    index: int,
) -> dict[str, Any]:
    """Return ``saved`` on the parameter's device, moments quantized where the group wants that.

    Raises ValueError for tensors that are missing or do not fit.
    """
    label = label_of(group, group_index, index)
    tiling = tiling_of(param, group)
    check_param(param, group, label)
    if tiling is not None and CODES[0] not in saved:
        saved = _quantized(param, tiling, saved, group, group_index, index)
    names = FLOAT_STATE if tiling is None else (*CODES, *SCALES)
    missing = [name for name in ("step", *names) if name not in saved]
    if missing:
        raise ValueError(
            f"{label}: the loaded state lacks {missing}, it has {sorted(saved)}; load with the "
            "block and state_bits that it was saved with."
        )
    state = {"step": torch.as_tensor(saved["step"], dtype=torch.float32, device="cpu").clone()}
    for name in names:
        state[name] = saved[name].to(device=param.device)
        if name in SCALES:
            check_placed(state[name], _scale(param, tiling, label), f"{label}: {name}")
            continue
        check_same_layout(state[name], name, group, group_index, index)
        _check_dtype(state[name], torch.float32 if tiling is None else torch.uint8, label, name)
    return state


def _zeros(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format).detach()


def _scale(param: torch.Tensor, tiling: Any, label: str) -> torch.Tensor:
    """Return zeros for one scale per block; each rank has those of the blocks that it holds."""
    if not isinstance(param, TorchDTensor):
        return torch.zeros(tiling.grid, device=param.device)
    mesh, cut = param.device_mesh, read_cut(param, label)
    local = torch.zeros(
        (tiling.bands(param.to_local().numel()), tiling.grid[1]), device=param.to_local().device
    )
    placements: list = [Replicate()] * mesh.ndim
    if cut is not None:
        bands = [(tiling.bands(numel), ranks) for numel, ranks in cut.runs]
        placements[cut.axis] = RaggedShard.from_runs((0,), bands)
        local = local.view(-1)
    return DTensor.from_local(
        local, mesh, placements, shape=tiling.grid, stride=(tiling.grid[1], 1)
    )


def _quantized(
    param: torch.Tensor,
    tiling: Tiling,
    saved: dict[str, Any],
    group: Mapping[str, Any],
    group_index: int,
    index: int,
) -> dict[str, Any]:
    """Return the state of ``torch.optim.AdamW`` as ours; state without moments as it is."""
    if not all(name in saved for name in FLOAT_STATE):
        return saved
    state = new_state(param, tiling, label_of(group, group_index, index))
    for name, codes, scales, signed in zip(FLOAT_STATE, CODES, SCALES, SIGNED, strict=True):
        moment = saved[name].to(device=param.device)
        check_same_layout(moment, name, group, group_index, index)
        values = local_of(moment).reshape(-1).float()
        new_codes, new_scales = encode(values, tiling, signed=signed)
        local_of(state[codes]).view(-1).copy_(new_codes)
        local_of(state[scales]).view(-1).copy_(new_scales.view(-1))
    return {**state, "step": saved["step"]}


def _check_dtype(tensor: torch.Tensor, dtype: torch.dtype, label: str, name: str) -> None:
    if tensor.dtype != dtype:
        raise ValueError(
            f"{label}: {name} is {tensor.dtype}, expected {dtype}; codes and scales that were cast "
            "cannot be restored, so load what was saved."
        )
