# SPDX-License-Identifier: Apache-2.0
"""See what is where: layouts, which rank holds what of a parameter, and what differs."""

from vescale.fsdp.inspect.comparing import diff
from vescale.fsdp.inspect.differences import Diff, Difference
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
    "Diff",
    "Difference",
    "GroupLayout",
    "Layout",
    "Location",
    "Part",
    "TensorLayout",
    "diff",
    "layout",
    "layout_of_groups",
    "plot",
    "where",
]
