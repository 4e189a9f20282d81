# SPDX-License-Identifier: Apache-2.0
"""The old ``vescale.ddp``: data parallel with flat gradient buffers."""

from vescale.legacy.ddp.distributed_data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
