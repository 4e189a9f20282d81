# SPDX-License-Identifier: Apache-2.0
"""The API of the veScale of 2023 to 2025, by its old names, on stock torch.

What exists so far: ``devicemesh_api`` and ``debug``. Importing this package patches nothing and
prints nothing.
"""

import vescale.legacy._shadow  # noqa: F401  first: refuses to load beside the old `vescale`
from vescale.legacy import debug, devicemesh_api

__all__ = ["debug", "devicemesh_api"]
