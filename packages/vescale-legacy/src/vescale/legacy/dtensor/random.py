# SPDX-License-Identifier: Apache-2.0
"""Random numbers of one device on DTensors, by the old names; see ``vescale.dtensor.random``."""

import os
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor.random import get_mode, set_mode

__all__ = [
    "OffsetBasedRNGTracker",
    "ThreadBasedRNGTracker",
    "init_vescale_rng_tracker",
    "is_rng_supported_mesh",
    "manual_seed",
    "single_device_rand",
]

DEVICE_TYPES = ("cpu", "cuda")
STREAM = "parallel-rng"


@dataclass
class RNGTracker:
    """Says which seed random operations on DTensors go by; the numbers come from PyTorch's
    generators, so there is nothing to track."""

    device_type: str = "cuda"
    seed: int = 0

    @property
    def distribute_region_enabled(self) -> bool:
        """Whether numbers depend on the place in the whole tensor."""
        return get_mode() == "device"

    def get_seed(self, name: str) -> int:
        """Return the seed of the stream "parallel-rng"; ``RuntimeError`` for another name."""
        if name != STREAM:
            raise RuntimeError(f"there is no random stream {name!r}; there is {STREAM!r}.")
        return self.seed


class ThreadBasedRNGTracker(RNGTracker):
    """Of the numbers of one device, the default."""


class OffsetBasedRNGTracker(RNGTracker):
    """Of PyTorch's own way, ``VESCALE_SINGLE_DEVICE_RAND=0``."""


_rng_tracker: RNGTracker | None = None


def init_vescale_rng_tracker(device_type: str = "cuda") -> RNGTracker:
    """Return a tracker for all ranks, seeded as rank 0 is, and set the mode; collective.

    Its class tells what ``VESCALE_SINGLE_DEVICE_RAND`` asks for. ``NotImplementedError``: another
    device type than cpu or cuda.
    """
    _check_device_type(device_type, "init_vescale_rng_tracker")
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    torch.manual_seed(seed[0])
    return _track(device_type, seed[0])


def _track(device_type: str, seed: int) -> RNGTracker:
    global _rng_tracker
    single = single_device_rand()
    set_mode("device" if single else "off")
    _rng_tracker = (ThreadBasedRNGTracker if single else OffsetBasedRNGTracker)(device_type, seed)
    return _rng_tracker


def _check_device_type(device_type: str, caller: str) -> None:
    if device_type not in DEVICE_TYPES:
        raise NotImplementedError(
            f"{caller} for {device_type!r}: expected a device type of {list(DEVICE_TYPES)}."
        )


def manual_seed(seed: int, device_mesh: DeviceMesh, tp_dim: int = 0) -> None:
    """Seed the ranks of the mesh, and let random operations on DTensors draw as one device does.

    All ranks of the world call it, with one seed: ``RuntimeError`` on each (message has
    ``different seed values``) otherwise. ``NotImplementedError``: a mesh of another device type
    than cpu or cuda. ``tp_dim`` has no meaning any more: a number depends on its place in the whole
    tensor. With ``VESCALE_SINGLE_DEVICE_RAND=0`` the numbers are those of PyTorch's own DTensor.
    """
    _check_device_type(device_mesh.device_type, "manual_seed")
    seeds = [None] * dist.get_world_size()
    dist.all_gather_object(seeds, seed)
    if len(set(seeds)) > 1:
        raise RuntimeError(
            f"manual_seed got different seed values, by rank: {seeds}; pass the same on every rank."
        )
    if device_mesh.get_coordinate() is not None:
        torch.manual_seed(seed)
    _track(device_mesh.device_type, seed)


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
