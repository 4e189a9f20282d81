# SPDX-License-Identifier: Apache-2.0
"""See what DTensor does: every operation and every collective, on the ranks you choose."""

from vescale.legacy.debug.debug_log import DebugLogger

__all__ = ["DebugLogger"]
