# SPDX-License-Identifier: Apache-2.0
"""The old ``vescale.model``: ``patch``, forwards of modules whose parameters are sharded."""

from vescale.legacy.model import patch

__all__ = ["patch"]
