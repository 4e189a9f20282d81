# SPDX-License-Identifier: Apache-2.0
"""From the command line to an exit code, on every rank."""

import contextlib
import os
import sys
from collections.abc import Sequence

from lm.config import parse_config
from lm.errors import BadInputError, CheckFailedError, StoppedError
from lm.launch import check_nproc, launch
from lm.ranks import join
from lm.session import run_session
from lm.stop import STOPPED, StopRequest


def run(arguments: Sequence[str], stop: StopRequest) -> int:
    """Run one rank, or start several; return the exit code: 0, 1 failed, 2 bad input, 130 stopped.

    Only the first rank prints.
    """
    leads = os.environ.get("RANK", "0") == "0"
    with contextlib.ExitStack() as stack:
        if not leads:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        try:
            config = parse_config(arguments)
            if config.nproc and "WORLD_SIZE" not in os.environ:
                check_nproc(config.nproc, config.device)
                return STOPPED if stop else launch(sys.argv[0], arguments, config.nproc)
            with join(config.device, config.threads, stop) as ranks:
                run_session(config, ranks)
        except BadInputError as error:
            return _end(leads, 2, f"train_lm.py: {error}")
        except CheckFailedError as error:
            return _end(leads, 1, f"train_lm.py: {error}")
        except StoppedError as error:
            return _end(leads, STOPPED, f"train_lm.py: {error}")
    return 0


def _end(leads: bool, code: int, message: str) -> int:
    if leads:
        print(message, file=sys.stderr)
    return code
