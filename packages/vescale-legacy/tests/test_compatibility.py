# SPDX-License-Identifier: Apache-2.0
"""What changes PyTorch does so when it is called, once, and adds no more than it says."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from testing.ranks import DEVICE
from vescale.legacy import (
    __version__,
    deprecated_function,
    disable_jit_script,
    install,
    switch_dtensor_for_torch_export,
)
from vescale.legacy._torch_compat import AsyncCollectiveTensor


def check_installed(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    plain = DTensor.from_local(torch.ones(2, 3, device=DEVICE), mesh, [Shard(0)])
    with pytest.raises(TypeError):
        plain.redistribute(mesh, [Replicate()], True)
    install()
    once = DTensor.redistribute, DTensor.to_local, DTensor.from_local
    install()
    assert once == (DTensor.redistribute, DTensor.to_local, DTensor.from_local)
    moved = plain.redistribute(mesh, [Replicate()], True)
    assert moved.placements == (Replicate(),)
    done = moved.to_local(async_output=False)
    assert not isinstance(done, AsyncCollectiveTensor)
    assert done.shape == (2 * world_size, 3)
    uneven = torch.ones(1 if rank else 2, 3, device=DEVICE)  # as torch.chunk cuts
    x = DTensor.from_local(uneven, mesh, [Shard(0)], support_uneven=True)
    assert x.shape == (1 + world_size, 3)
    # What torch has stays.
    assert plain.redistribute(placements=[Replicate()]).to_local(grad_placements=None).shape[1] == 3
    assert DTensor.from_local(uneven[:1], mesh, [Replicate()], run_check=False).shape == (1, 3)
    plain = plain.detach().requires_grad_()
    plain.redistribute(mesh, [Replicate()], False).to_local().sum().backward()
    assert plain.grad.placements == (Shard(0),)


def test_methods_take_the_old_keywords(run_ranks):
    run_ranks(check_installed, 2, exact=True)


def check_scripted(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    disable_jit_script()
    off = torch.jit.script
    disable_jit_script()
    assert torch.jit.script is off
    with pytest.warns(UserWarning, match="switched off by disable_jit_script"):
        scripted = torch.jit.script(double)
    x = DTensor.from_local(torch.ones(2, device=DEVICE), mesh, [Shard(0)])
    assert torch.equal(scripted(x).to_local(), double(x).to_local())


def test_scripted_functions_take_dtensors(run_ranks):
    run_ranks(check_scripted, 2)


def test_small_names():
    @deprecated_function
    def old(x, *, y=1):
        """Add."""
        return x + y

    assert old.__doc__ == "Add."
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="old is deprecated"):
            assert old(1, y=2) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
        assert switch_dtensor_for_torch_export(program) is program
    assert __version__.count(".") >= 2
