# SPDX-License-Identifier: Apache-2.0
"""``loss_parallel``: cross entropy of logits that are sharded on the class dim."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.tensor.parallel import loss_parallel as stock_loss_parallel

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """While open, cross entropy takes DTensor logits [N, C] or [N, C, ...] sharded on C.

    Nothing is gathered: the loss is replicated, and the gradient sharded like the logits. The
    target is plain or replicated; ``weight``, if any, replicated; ``label_smoothing`` is not
    supported. Run backward inside too. ``ValueError`` (message has ``loss_parallel``) where the
    logits are cut on another dim. Unlike torch's, it closes on exceptions too.
    """
    stock = stock_loss_parallel()
    stock.__enter__()
    try:
        yield
    finally:
        stock.__exit__(None, None, None)
