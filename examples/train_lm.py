# SPDX-License-Identifier: Apache-2.0
"""Train a small language model on real text, its parameters sharded over all ranks.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py
    python examples/train_lm.py --nproc 2          # the same, with exit codes passed on

The model, the loop and the rest are in ``lm/``; ``lm/train.py`` is the part to read first.
"""

import sys

from lm.stop import StopRequest


def main() -> int:
    """Run one rank, or start the ranks; return the exit code."""
    # Before torch, whose import takes seconds: a Ctrl-C in them must end all ranks alike.
    stop = StopRequest()
    stop.install()
    from lm.main import run

    return run(sys.argv[1:], stop)


if __name__ == "__main__":
    sys.exit(main())
