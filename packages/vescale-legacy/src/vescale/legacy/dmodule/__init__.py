# SPDX-License-Identifier: Apache-2.0
"""The old ``vescale.dmodule``: modules parallelized by a plan of names."""

from vescale.legacy.dmodule.api import is_dmodule, parallelize_module
from vescale.legacy.dmodule.placements_interface import PlacementsInterface

__all__ = ["PlacementsInterface", "is_dmodule", "parallelize_module"]
