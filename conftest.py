# SPDX-License-Identifier: Apache-2.0
"""Make the rank fixture available to every suite."""

from testing.ranks import run_ranks

__all__ = ["run_ranks"]
