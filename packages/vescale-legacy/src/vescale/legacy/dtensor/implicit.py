# SPDX-License-Identifier: Apache-2.0
"""Refuse what torch does silently: resharding the inputs of an operation by communication."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from vescale.legacy._torch_compat import ExplicitRedistributionContext

__all__ = ["no_implicit_resharding"]


@contextmanager
def no_implicit_resharding() -> Iterator[None]:
    """While open, an operation of this thread that would communicate to reshard raises.

    ``RuntimeError`` (message has ``implicit resharding``). Resharding that needs no
    communication, such as cutting a replicated input, is done as torch does. Open it around
    forward only: backward reshards of its own. ``VESCALE_DISABLE_REDISTRIBUTE=0`` makes it do
    nothing.
    """
    if os.environ.get("VESCALE_DISABLE_REDISTRIBUTE", "1") != "1":
        yield
        return
    try:
        with ExplicitRedistributionContext(mode="raise"):
            yield
    except RuntimeError as error:
        if not str(error).startswith("Implicit redistribution"):
            raise
        raise RuntimeError(
            f"implicit resharding: {error}. Redistribute its inputs before, by the plan or "
            "redistribute_dtensor, or set VESCALE_DISABLE_REDISTRIBUTE=0 to allow it."
        ) from error
