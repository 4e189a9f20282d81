# SPDX-License-Identifier: Apache-2.0
"""Turn Ctrl-C and SIGTERM into a request that the ranks obey together, between two steps."""

import os
import signal
import time
from types import FrameType

STOPPED = 130  # the exit code of a run that was asked to stop, as shells have it for SIGINT
PATIENCE_SECONDS = 5.0


class StopRequest:
    """Remembers that this rank was asked to stop.

    One Ctrl-C can arrive several times: from the terminal and again from torchrun. Only a signal
    that comes when the ranks had time to obey the first one ends the process at once.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def __bool__(self) -> bool:
        return self._since is not None

    def install(self) -> None:
        """Take over SIGINT and SIGTERM for this process."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since > PATIENCE_SECONDS:
            os._exit(STOPPED)  # a peer or a collective hangs; nothing half-written is published
