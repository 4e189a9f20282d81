# SPDX-License-Identifier: Apache-2.0
"""Errors that old code can still catch: the old API asserted, and its users caught that."""


class LegacyValueError(ValueError, AssertionError):
    """A caller's mistake: a ``ValueError`` that ``except AssertionError`` catches too."""


class LegacyStateError(RuntimeError, AssertionError):
    """A call at the wrong time: a ``RuntimeError`` that ``except AssertionError`` catches too."""
