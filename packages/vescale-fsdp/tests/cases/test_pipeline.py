# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of torch.distributed.pipelining, each sharded over its data-parallel ranks."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from testing.models import Block
from testing.ranks import DEVICE
from vescale.fsdp import Rows, clip_grad_norm_, fully_shard, no_sync
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.param_group import State
from vescale.fsdp.units import param_groups

MICRO_BATCHES, LAYERS, STEPS = 4, 4, 3


class CountReductions:
    def __enter__(self):
        self.count, reduce = 0, DBuffer.reduce_scatter

        def counted(buffer, *options):
            self.count += 1
            return reduce(buffer, *options)

        self._patch = mock.patch.object(DBuffer, "reduce_scatter", counted)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()


def layers():
    torch.manual_seed(5)
    return [Block().to(DEVICE) for _ in range(LAYERS)]


def data(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    x, y = torch.randn(2, 8, 13, generator=generator).to(DEVICE)
    return x, y


def sharded(chunk, mesh, **options):
    for layer in chunk:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(chunk, mesh=mesh, **options)


def reference_steps(dp_size):
    """Train in one process, and return the losses of each step and data rank, and the model."""
    model, losses = nn.Sequential(*layers()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        row = []
        for index in range(dp_size):
            x, y = data(step, index)
            loss = nn.functional.mse_loss(model(x), y)
            (loss / dp_size).backward()
            row.append(loss.item())
        losses.append(row)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def check_schedule(rank, world_size, schedule, per_rank, once=False, **options):
    """``once``: gradients of all micro-batches are reduced together, after the schedule."""
    mesh = init_device_mesh(DEVICE, (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    at, count = pp.get_local_rank(), 2 * per_rank
    size = LAYERS // count
    mine = [at + 2 * turn for turn in range(per_rank)]  # the stages of this rank
    chunks = [
        sharded(nn.Sequential(*layers()[i * size : (i + 1) * size]), dp, **options) for i in mine
    ]
    stages = [
        PipelineStage(chunk, i, count, torch.device(DEVICE), group=pp.get_group())
        for i, chunk in zip(mine, chunks, strict=True)
    ]
    given = stages if per_rank > 1 else stages[0]

    def loss_fn(output, target):
        loss = nn.functional.mse_loss(output, target)
        return loss / MICRO_BATCHES if once else loss

    runner = schedule(given, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn, scale_grads=not once)
    optimizer = torch.optim.AdamW([p for c in chunks for p in c.parameters()], lr=1e-2)
    losses, reference = reference_steps(world_size // 2)
    for step in range(STEPS):
        x, y = data(step, dp.get_local_rank())
        seen = []
        inputs = (x,) if at == 0 else ()
        targets = {"target": y, "losses": seen} if at == 1 else {}
        with CountReductions() as reductions, ExitStack() as stack:
            for chunk in chunks if once else ():
                stack.enter_context(no_sync(chunk))
            runner.step(*inputs, **targets)
            for chunk in chunks if once else ():
                assert all(param.grad is None for param in chunk.parameters())
                chunk.reduce_gradients()
        if step:  # the first one also tries what is sent
            units = sum(len(param_groups(chunk)) for chunk in chunks)
            assert reductions.count == units * (1 if once else MICRO_BATCHES)
        if at == 1:
            mean = torch.stack(seen).mean().item() * (MICRO_BATCHES if once else 1)
            assert mean == pytest.approx(losses[step][dp.get_local_rank()], rel=1e-5)
        for chunk in chunks:
            assert all(group.state is State.SHARDED for group in param_groups(chunk))
            assert clip_grad_norm_(chunk, 1e9).isfinite()
        optimizer.step()
        optimizer.zero_grad()
    for stage, chunk in zip(mine, chunks, strict=True):
        for name, param in chunk.named_parameters():
            layer, _, rest = name.partition(".")
            expected = reference[stage * size + int(layer)].get_parameter(rest)
            torch.testing.assert_close(
                param.full_tensor(), expected, rtol=1e-4, atol=1e-5, msg=name
            )


def check_all(rank, world_size):
    check_schedule(rank, world_size, ScheduleGPipe, 1)
    check_schedule(rank, world_size, Schedule1F1B, 1, granularity=Rows(4))
    check_schedule(rank, world_size, Schedule1F1B, 1, reshard_after_forward=False)
    check_schedule(rank, world_size, ScheduleInterleaved1F1B, 2)
    for schedule, per_rank in ((ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)):
        check_schedule(rank, world_size, schedule, per_rank, once=True)


def test_stages_of_a_pipeline_equal_one_process(run_ranks):
    run_ranks(check_all, 4, exact=True)
