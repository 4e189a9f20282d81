# SPDX-License-Identifier: Apache-2.0
"""Start the ranks through torchrun's own launcher, and pass their exit code on.

``torchrun`` itself ends with 1 and a report whatever a rank's exit code is.
"""

import logging
import os
import sys
import uuid
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lm.errors import BadInputError
from lm.stop import STOPPED

RANKS_PER_CORE = 4
LOOPBACK = "127.0.0.1"  # works without a network and whatever the host is called


def check_nproc(nproc: int, device: str) -> None:
    """Raise BadInputError for more ranks than this machine can run: they would stall it."""
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    most = max(gpus, RANKS_PER_CORE * (os.cpu_count() or 1))
    if nproc > most:
        raise BadInputError(
            f"--nproc {nproc}: this machine has {os.cpu_count()} CPU cores and {gpus} GPUs, room "
            f"for {most} ranks; pass fewer, or use torchrun on several machines."
        )


def launch(script: str, arguments: Sequence[str], nproc: int) -> int:
    """Run ``script`` on ``nproc`` ranks of this machine; return the exit code of the first to end.

    0 if all ranks ended well, 130 if they were stopped by a signal.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,
    )
    logging.disable(logging.ERROR)  # in this process only: the ranks say what is wrong
    try:
        elastic_launch(config, sys.executable)("-u", script, *arguments)
    except SignalException:
        return STOPPED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in (1, 2, STOPPED):
            return failure.exitcode
        print(f"train_lm.py: rank {rank} ended with code {failure.exitcode}.", file=sys.stderr)
        return 1
    return 0
