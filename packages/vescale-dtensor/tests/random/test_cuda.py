# SPDX-License-Identifier: Apache-2.0
"""The experimental CUDA replay, with numpy in place of the kernel: parts of every layout."""

import itertools

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from vescale.dtensor import RaggedShard, _StridedShard, random
from vescale.dtensor.random import cuda, philox
from vescale.dtensor.random.operators import _dropout_mask
from vescale.dtensor.random.parts import strips_of

aten = torch.ops.aten
LIMIT = philox.thread_limit(1, 512)  # a small GPU, so that threads come round


def emulate(launch, index, out):
    index = index.numpy()
    if launch.kind == cuda.UNIFORM:
        values = philox.uniform(launch.draws, index, *launch.args)
    elif launch.kind == cuda.NORMAL:
        values = philox.normal(launch.draws, index, *launch.args)
    else:
        values = philox.bernoulli(launch.draws, index, *launch.args)
    out.copy_(torch.from_numpy(values))


@pytest.mark.parametrize("chunk", [7, 1 << 22])
@pytest.mark.parametrize("shape", [(33, 70), (7, 5), (300, 8), (5, 6, 7)])
def test_parts_are_those_of_the_whole(monkeypatch, shape, chunk):
    monkeypatch.setattr(cuda, "INDEX_CHUNK", chunk)
    numel, last = torch.Size(shape).numel(), len(shape) - 1
    for func, args, dtype in (
        (aten.uniform_.default, (-1.0, 3.0), torch.float32),
        (aten.normal_.default, (), torch.bfloat16),
        (aten.bernoulli_.float, (0.3,), torch.float32),
        (_dropout_mask, (0.25, torch.bfloat16), torch.bool),
    ):
        launch = cuda.launch_of(func, args, numel, dtype, 5, 16, LIMIT)
        whole = torch.empty(numel, dtype=dtype)
        emulate(launch, torch.arange(numel), whole)
        for mesh, placements in (
            ((3,), [Shard(0)]),
            ((4,), [Shard(last)]),
            ((2, 2), [Shard(0), Shard(last)]),
            ((2, 2), [Replicate(), Shard(last)]),
            ((2,), [_StridedShard(last, split_factor=2)]),
            ((3,), [RaggedShard(tuple(range(len(shape))), (17, 0, numel - 17))]),
        ):
            for coordinate in itertools.product(*map(range, mesh)):
                strips = strips_of(shape, placements, mesh, coordinate)
                local = torch.zeros(sum(strip.numel for strip in strips), dtype=dtype)
                cuda.write_part(launch, strips, local, emulate)
                parts = [whole[a : a + n] for strip in strips for a, n in strip.segments()]
                assert torch.equal(local, torch.cat(parts) if parts else local[:0])


def test_the_offset_trackers_of_torch_differ():
    """Emulated: torch adds the elements before a shard to the offset; half of two shards agree."""
    numel = 64 * 48
    whole = philox.uniform(philox.Draws(numel, 5, 0, LIMIT), np.arange(numel), 0.0, 1.0)
    half = numel // 2
    shards = [
        philox.uniform(philox.Draws(half, 5, rank * half, LIMIT), np.arange(half), 0.0, 1.0)
        for rank in range(2)
    ]
    assert np.mean(np.concatenate(shards) == whole) <= 0.5


def test_replay_is_off_and_for_cuda_alone():
    local = torch.empty(3)
    assert not cuda.serves(aten.uniform_.default, local, 3)
    random.set_mode("off", cuda_replay=True)
    assert not cuda.serves(aten.uniform_.default, local, 3)
    random.set_mode("off")


@pytest.mark.gpu
def test_replay_is_what_torch_draws():
    random.set_mode("off", cuda_replay=True)
    try:
        for func, args in (
            (aten.uniform_.default, (-1.0, 3.0)),
            (aten.normal_.default, (1.0, 2.0)),
            (aten.bernoulli_.float, (0.3,)),
            (aten.exponential_.default, (1.5,)),
        ):
            for dtype in cuda.FLOATS:
                torch.manual_seed(3)
                whole = torch.empty(1000, 37, dtype=dtype, device="cuda")
                func(whole, *args)
                state = torch.cuda.get_rng_state()
                torch.manual_seed(3)
                strips = strips_of((1000, 37), [Shard(1)], (3,), (1,))
                local = torch.empty(13_000, dtype=dtype, device="cuda")
                assert cuda.serves(func, local, whole.numel())
                cuda.fill_part(func, args, whole.numel(), strips, local, None)
                assert torch.equal(local.view(1000, 13), whole[:, 13:26])
                assert torch.equal(torch.cuda.get_rng_state(), state)
    finally:
        random.set_mode("off")
