# SPDX-License-Identifier: Apache-2.0
"""Let all ranks of a mesh draw the same random numbers for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def one_random_stream(mesh: DeviceMesh | None, device: torch.device) -> Iterator[None]:
    """Draw from the generators of the mesh's first rank, of the CPU and of ``device``.

    Afterwards a rank whose generators were in another state goes on from where it was, and the
    others from where the draws ended. Collective; does nothing without a mesh.
    """
    if mesh is None or mesh.get_coordinate() is None:
        yield
        return
    generators: list[tuple[Callable, Callable]] = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        generators.append((module.get_rng_state, module.set_rng_state))
    own = [get() for get, _ in generators]
    shared = [_from_first(mesh, state) for state in own]
    for (_, set_state), state in zip(generators, shared, strict=True):
        set_state(state)
    try:
        yield
    finally:
        for (_, set_state), before, state in zip(generators, own, shared, strict=True):
            if not torch.equal(before, state):
                set_state(before)


def _from_first(mesh: DeviceMesh, state: torch.Tensor) -> torch.Tensor:
    if mesh.device_type == "cpu":
        sent = state.clone()
    else:
        module = torch.get_device_module(mesh.device_type)
        sent = state.to(torch.device(mesh.device_type, module.current_device()))
    for axis in range(mesh.ndim):
        dist.broadcast(sent, group_src=0, group=mesh.get_group(axis))
    return sent.cpu()
