# SPDX-License-Identifier: Apache-2.0
"""The ways a run ends early with one line instead of a traceback."""


class BadInputError(ValueError):
    """What the user passed cannot work; the message says what to pass instead."""


class CheckFailedError(RuntimeError):
    """The run ended, but one of its own checks did not hold."""


class StoppedError(Exception):
    """All ranks agreed to stop because one of them was asked to."""


AGREED = (BadInputError, CheckFailedError, StoppedError)  # all ranks raise these together
