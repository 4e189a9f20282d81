# SPDX-License-Identifier: Apache-2.0
"""Errors serve two readers: old code that caught assertions, and new code."""

import pytest

from vescale.legacy._errors import LegacyStateError, LegacyValueError


@pytest.mark.parametrize(
    ("error", "kind"), [(LegacyValueError, ValueError), (LegacyStateError, RuntimeError)]
)
def test_an_error_is_of_both_kinds(error, kind):
    for caught in (kind, AssertionError):
        with pytest.raises(caught, match="what to do"):
            raise error("what to do")
