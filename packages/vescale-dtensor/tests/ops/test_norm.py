# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor
from vescale.dtensor.debug import CommDebugMode

UNITS = {2: [(1, 3), (0, 5), (1, 1)], 3: [(1, 0, 3), (0, 8, 0), (2, 1, 1)]}
UNITS |= {1: [(1,), (2,), (1,)], 4: [(2, 0, 1, 1), (0, 0, 1, 0), (1, 1, 1, 1)]}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check_list(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    wholes = [numbers(8, 6, seed=n) for n in range(3)] + [numbers(4, seed=4).bfloat16()]
    wholes.append(torch.empty(0, 2, device=DEVICE))
    placements = [[RaggedShard((0,), units)] for units in UNITS[world_size]]
    placements += [[Shard(0)], [RaggedShard((0,), [1] * world_size)]]
    tensors = [distribute_tensor(t, mesh, p) for t, p in zip(wholes, placements, strict=True)]
    for order in (2.0, 1.0, 3.0, 0.0, math.inf, -math.inf):
        members = slice(0, 4) if math.isinf(order) else slice(0, 5)  # the last one is empty
        with CommDebugMode() as mode:
            found = torch._foreach_norm(tensors[members], order)
        assert mode.get_total_counts() == 1
        for x, t in zip(found, wholes[members], strict=True):
            assert x.placements == (Replicate(),)
            assert x.dtype == t.dtype
            torch.testing.assert_close(x.full_tensor(), torch.linalg.vector_norm(t, order))
    with pytest.raises(RuntimeError, match=r"a plain tensor of shape \(3,\), which may differ"):
        torch._foreach_norm([numbers(3), tensors[0]], 2.0)
    found = torch._foreach_norm(tensors[:3], 2.0, torch.float64)
    assert {x.dtype for x in found} == {torch.float64}
    tensors[0].to_local().fill_(math.nan if rank == 0 else 1.0)
    for order in (2.0, math.inf):
        assert torch._foreach_norm(tensors, order)[0].full_tensor().isnan()


def check_clipping(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    wholes = [numbers(8, 6, seed=n) for n in range(3)]
    for foreach in (True, False, None):
        for order in (2.0, 1.0, math.inf):
            expected = [torch.nn.Parameter(t.clone()) for t in wholes]
            found = [
                torch.nn.Parameter(distribute_tensor(t, mesh, [RaggedShard((0,), units)]))
                for t, units in zip(wholes, UNITS[world_size], strict=True)
            ]
            for p in (*expected, *found):
                p.grad = p.detach() * 3
            want = torch.nn.utils.clip_grad_norm_(expected, 1.0, order)
            with CommDebugMode() as mode:
                total = torch.nn.utils.clip_grad_norm_(found, 1.0, order, foreach=foreach)
            assert foreach is False or mode.get_total_counts() == 1
            torch.testing.assert_close(total.full_tensor(), want)
            for p, q in zip(found, expected, strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    found[0].grad.to_local().fill_(math.inf if rank == 0 else 0.0)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(found, 1.0, error_if_nonfinite=True)


def check_two_axes(rank, world_size):
    """One all-reduce per mesh axis, whatever the tensors are split over."""
    mesh = init_device_mesh(DEVICE, (2, 2))
    line = init_device_mesh(DEVICE, (4,))
    ragged = RaggedShard((0,), (1, 3))
    wholes = [numbers(8, 6, seed=n) for n in range(4)]
    placements = [[ragged, Shard(1)], [ragged, Replicate()], [Replicate(), ragged], [Shard(0)] * 2]
    tensors = [distribute_tensor(t, mesh, p) for t, p in zip(wholes, placements, strict=True)]
    for order in (2.0, 1.0, math.inf):
        with CommDebugMode() as mode:
            found = torch._foreach_norm(tensors, order)
        assert mode.get_total_counts() == 2
        for x, t in zip(found, wholes, strict=True):
            torch.testing.assert_close(x.full_tensor(), torch.linalg.vector_norm(t, order))
            assert x.device_mesh == mesh
    other = distribute_tensor(wholes[0], line, [RaggedShard((0,), (1, 0, 2, 1))])
    found = torch._foreach_norm([*tensors, other], 2.0)
    assert type(found[-1]) is DTensor
    assert found[-1].device_mesh == line
    torch.testing.assert_close(found[-1].full_tensor(), wholes[0].norm())


def check_norm(rank, world_size):
    check_list(rank, world_size)
    check_clipping(rank, world_size)
    if world_size == 4:
        check_two_axes(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_norms_of_lists_cost_one_all_reduce_per_axis(run_ranks, world_size):
    run_ranks(check_norm, world_size)
