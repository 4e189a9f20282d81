# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO-3 as a side of ``fsdp_vs_fsdp2``: ``pip install deepspeed``.

Its options are the defaults, but for what makes it do as the other sides do: it shards small
parameters too, gives parameters back after their forward, gathers no more than a layer ahead, and
takes torch's AdamW. On CPU it communicates by gloo where Intel's oneCCL is not installed.
"""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn


def wrap(model: nn.Module, lr: float) -> nn.Module:
    """Return the engine that trains ``model``; needs a process group."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    layer = sum(param.numel() for param in model.layers[0].parameters())
    stage = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": 2 * layer,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": stage,
        },
    )
    return engine


def kept(engine: nn.Module) -> Iterator[torch.Tensor]:
    """Yield what lives between two steps: shards to compute with, and those that are trained."""
    for param in engine.module.parameters():
        yield param.ds_tensor
    yield from engine.optimizer.fp32_partitioned_groups_flat
    for state in engine.optimizer.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    yield from engine.module.buffers()
