# SPDX-License-Identifier: Apache-2.0
"""Dispatch of operators on ragged tensors.

An operator runs on the flat local tensors where that gives the right values, and raises
otherwise; it never moves data silently. Only reductions (of their result) and ``copy_`` between
layouts communicate.
"""

from vescale.dtensor.ops.dispatch import dispatch

__all__ = ["dispatch"]
