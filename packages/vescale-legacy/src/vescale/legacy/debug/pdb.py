# SPDX-License-Identifier: Apache-2.0
"""A debugger for ranks: ``pdb`` that still hears the terminal in a child process."""

import functools
import pdb
import sys
from typing import Any, TextIO

__all__ = ["ForkedPdb"]


class ForkedPdb(pdb.Pdb):
    """``ForkedPdb().set_trace()`` stops at the next line, in a child process too.

    ``multiprocessing`` gives a child an empty ``sys.stdin``, on which pdb stops at once. This
    one reads file descriptor 0 while it talks, then puts ``sys.stdin`` back. Stop one rank only:
    ranks that share a terminal would share what is typed.
    """

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """Talk to the user; pdb calls it at each stop."""
        before, sys.stdin = sys.stdin, _terminal()
        try:
            super().interaction(*args, **kwargs)
        finally:
            sys.stdin = before


@functools.cache
def _terminal() -> TextIO:
    # One stream for the life of the process: it reads ahead, and another one opened at the next
    # stop would miss the lines that this one has read.
    return open(0, closefd=False)
