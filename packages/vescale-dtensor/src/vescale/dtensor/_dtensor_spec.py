# SPDX-License-Identifier: Apache-2.0
"""torch's specs by the import path of the first RaggedShard veScale."""

from vescale.dtensor._torch_compat import DTensorSpec, TensorMeta

__all__ = ["DTensorSpec", "TensorMeta"]
