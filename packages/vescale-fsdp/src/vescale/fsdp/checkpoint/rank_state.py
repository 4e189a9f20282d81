# SPDX-License-Identifier: Apache-2.0
"""What each rank has for itself: states of random generators, place in its data.

Kept as one tensor of bytes per rank, so that a checkpoint has them in its tensor files.
"""

import io
import random
from typing import Any

import numpy as np
import torch


def generators(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy, torch, and of this rank's GPU."""
    version, numbers, gauss = random.getstate()
    ours: Any = np.random.get_state()
    name, keys, place, has_gauss, cached = ours
    state = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.tensor(keys.astype(np.int64)), place, has_gauss, cached],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_generators(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators of this process into what ``generators`` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def pack(value: Any) -> torch.Tensor:
    """Return ``value`` as bytes, a uint8 tensor [nbytes].

    Raises TypeError for what could not be read back without running code.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    packed = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    try:
        unpack(packed)
    except Exception as error:
        raise TypeError(
            f"rank_state has something that torch.load(weights_only=True) refuses: {error}; pass "
            "numbers, texts, tensors, and dicts and lists of them."
        ) from error
    return packed


def unpack(packed: torch.Tensor) -> Any:
    """Return what ``pack`` was given."""
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
