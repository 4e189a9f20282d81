# SPDX-License-Identifier: Apache-2.0
"""The helpers of ``vescale_utils`` by their other import path."""

from vescale.dtensor.vescale_utils import (
    best_effort_reshape,
    cvt_inclusive_to_exclusive,
    flatten_index,
    get_ragged_shard,
    get_unflattened_dims,
    get_unflattened_shape_and_offset_before_ragged_shard,
    get_unflattened_shape_and_offset_before_ragged_shard_,
    retrieve_flattened_index_before_ragged_shard,
    substitute_ragged_with_replicate,
    unravel_index,
)

__all__ = [
    "best_effort_reshape",
    "cvt_inclusive_to_exclusive",
    "flatten_index",
    "get_ragged_shard",
    "get_unflattened_dims",
    "get_unflattened_shape_and_offset_before_ragged_shard",
    "get_unflattened_shape_and_offset_before_ragged_shard_",
    "retrieve_flattened_index_before_ragged_shard",
    "substitute_ragged_with_replicate",
    "unravel_index",
]
