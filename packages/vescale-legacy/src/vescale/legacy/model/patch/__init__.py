# SPDX-License-Identifier: Apache-2.0
"""Forwards that single modules of a DModule are given: on the instance, never on torch's class."""

from collections.abc import Callable

from vescale.legacy.model.patch import linear, vp_cross_entropy, vp_embedding

__all__ = ["get_all_model_patch", "linear", "vp_cross_entropy", "vp_embedding"]


def get_all_model_patch() -> list[Callable]:
    """Return the patches; each takes (root module, resolved forward plan, mesh)."""
    return [
        linear.patch_row_parallel_linear,
        vp_embedding.patch_vocab_parallel_embedding,
        vp_cross_entropy.patch_vocab_parallel_cross_entropy,
    ]
