# SPDX-License-Identifier: Apache-2.0
"""The old ``vescale.optim``: optimizers for DDP and DModule models."""

from vescale.legacy.optim.base_optimizer import BasicOptimizer, BasicOptimizerHook
from vescale.legacy.optim.distributed_optimizer import DistributedOptimizer

__all__ = ["BasicOptimizer", "BasicOptimizerHook", "DistributedOptimizer"]
