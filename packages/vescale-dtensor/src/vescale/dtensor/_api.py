# SPDX-License-Identifier: Apache-2.0
"""``DTensor`` and what makes one, by the import path of the first RaggedShard veScale."""

from vescale.dtensor.factory import distribute_tensor, empty, full, ones, rand, randn, zeros
from vescale.dtensor.tensor import DTensor

__all__ = ["DTensor", "distribute_tensor", "empty", "full", "ones", "rand", "randn", "zeros"]
