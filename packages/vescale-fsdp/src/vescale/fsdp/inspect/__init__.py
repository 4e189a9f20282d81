# SPDX-License-Identifier: Apache-2.0
"""See what is where, and when: layouts, which rank holds what of a parameter, what differs between
two models or checkpoints, and what units do in a step."""

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
from vescale.fsdp.inspect.recording import merge_traces, record_step

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
    "merge_traces",
    "plot",
    "record_step",
    "where",
]
