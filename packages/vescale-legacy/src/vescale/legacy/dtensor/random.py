# SPDX-License-Identifier: Apache-2.0
"""Random numbers of one device on DTensors, by the old names; see ``vescale.dtensor.random``."""

import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor.random import set_mode

__all__ = ["is_rng_supported_mesh", "manual_seed", "single_device_rand"]

DEVICE_TYPES = ("cpu", "cuda")


def manual_seed(seed: int, device_mesh: DeviceMesh, tp_dim: int = 0) -> None:
    """Seed the ranks of the mesh, and let random operations on DTensors draw as one device does.

    All ranks of the world call it, with one seed: ``RuntimeError`` on each (message has
    ``different seed values``) otherwise. ``NotImplementedError``: a mesh of another device type
    than cpu or cuda. ``tp_dim`` has no meaning any more: a number depends on its place in the whole
    tensor. With ``VESCALE_SINGLE_DEVICE_RAND=0`` the numbers are those of PyTorch's own DTensor.
    """
    if device_mesh.device_type not in DEVICE_TYPES:
        raise NotImplementedError(
            f"manual_seed on {device_mesh}: expected a device type of {list(DEVICE_TYPES)}."
        )
    seeds = [None] * dist.get_world_size()
    dist.all_gather_object(seeds, seed)
    if len(set(seeds)) > 1:
        raise RuntimeError(
            f"manual_seed got different seed values, by rank: {seeds}; pass the same on every rank."
        )
    if device_mesh.get_coordinate() is not None:
        torch.manual_seed(seed)
    set_mode("device" if single_device_rand() else "off")


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """Tell whether random operations on the mesh are supported; if not, with a ``UserWarning``."""
    if device_mesh.device_type in DEVICE_TYPES:
        return True
    warnings.warn(
        f"random operations on {device_mesh} are not supported; use one of {list(DEVICE_TYPES)}.",
        stacklevel=2,
    )
    return False


def single_device_rand() -> bool:
    """Tell whether ``VESCALE_SINGLE_DEVICE_RAND`` asks for the numbers of one device (default)."""
    return os.environ.get("VESCALE_SINGLE_DEVICE_RAND", "1") == "1"
