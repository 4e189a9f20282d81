# SPDX-License-Identifier: Apache-2.0
"""See what is where: layouts, and which rank holds what of a parameter."""

from vescale.fsdp.inspect.layouts import (
    GroupLayout,
    Layout,
    TensorLayout,
    layout,
    layout_of_groups,
    plot,
)
from vescale.fsdp.inspect.places import Location, Part, where

__all__ = [
    "GroupLayout",
    "Layout",
    "Location",
    "Part",
    "TensorLayout",
    "layout",
    "layout_of_groups",
    "plot",
    "where",
]
