# SPDX-License-Identifier: Apache-2.0
"""Reports on how parameters lie in memory and what a gather costs, on worlds of any size."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode  # as torch's documentation has it

from vescale.fsdp import Elements, MixedPrecisionPolicy, Rows, Whole, fully_shard
from vescale.fsdp.units import param_groups


class Sent(TorchDispatchMode):
    """What collectives read and write: (whole, part) of each."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "c10d::_allgather_base_":
            self.tensors.append((args[0], args[1]))
        elif name == "c10d::_reduce_scatter_base_":
            self.tensors.append((args[1], args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("world_size", [3, 5, 7, 11, 13])
@pytest.mark.parametrize("granularity", [Rows(1), Elements(), Whole()])
def test_every_part_starts_and_ends_on_16_bytes(fake_group, world_size, granularity):
    """Rows 7 and 8: in bfloat16 on odd worlds, gathered and reduced."""
    fake_group(world_size, rank=world_size - 1)
    policies = [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for policy in policies:
            model = nn.Linear(33, 10, dtype=dtype)
            fully_shard(model, mp_policy=policy, granularity=granularity)
            with Sent() as sent:
                model(torch.ones(2, 33, dtype=dtype)).sum().backward()
            assert len(sent.tensors) == 2
            for whole, part in sent.tensors:
                assert part.nbytes % 16 == 0
                assert whole.nbytes == world_size * part.nbytes
                assert whole.data_ptr() % 16 == 0
                assert part.data_ptr() % 16 == 0


class Allocations(TorchDispatchMode):
    """Count storages that operators make or that grow again."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def counted(storage, size):
            self.count += size > 0
            return resize(storage, size)

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", counted)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *args):
        self._patch.stop()
        return super().__exit__(*args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.numel():
            self.count += out.untyped_storage()._cdata not in known
        return out


def test_a_gather_allocates_once_however_many_parameters_it_brings(fake_group):
    """Row 95: also where it casts."""
    fake_group(4)
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = fully_shard(nn.Sequential(*(nn.Linear(7, 7) for _ in range(10))), mp_policy=policy)
        assert len(param_groups(model)) == 1
        for _ in range(3):
            with Allocations() as allocations:
                model.unshard()
            assert allocations.count == 1
            with Allocations() as allocations:
                model.reshard()
            assert allocations.count == 0


def test_a_reduction_allocates_twice_however_many_gradients_it_takes(fake_group):
    fake_group(4)
    counts = {}
    for layers in (2, 10):
        model = nn.Sequential(*(nn.Linear(7, 7, bias=False) for _ in range(layers)))
        fully_shard(model)
        (group,) = param_groups(model)
        grads = [torch.ones(7, 7) for _ in range(layers)]
        for _ in range(2):
            with Allocations() as allocations:
                for index, grad in enumerate(grads):
                    group.reduction.take(index, grad)
                group.start_reduce()
                group.finish_reduce()
            model.zero_grad()
        counts[layers] = allocations.count
    assert counts[2] == counts[10] <= 2, counts


class Experts(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("world_size", [16, 64])
def test_experts_fewer_than_ranks_travel_at_their_own_size(fake_group, world_size):
    """Row 5: by default, without a choice of the user's."""
    fake_group(world_size)
    model = Experts(4, 64, 32)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    with Sent() as sent:
        model(torch.ones(4, 2, 64)).sum().backward()
    for whole, part in sent.tensors:
        assert part.nbytes * world_size == whole.nbytes
        assert whole.nbytes <= 1.1 * 4 * 64 * 32 * 4


class LlamaBlock(nn.Module):
    def __init__(self, width=512, hidden=1376):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width // 4, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(self.gate(x) * self.up(x))


@pytest.mark.parametrize("world_size", [3, 5, 7, 11, 13])
def test_blocks_on_odd_worlds_are_padded_little(fake_group, world_size):
    """Row 8, in a block of the proportions of Llama's."""
    fake_group(world_size)
    model = fully_shard(LlamaBlock())
    assert param_groups(model)[0].plan.padding < 0.05
