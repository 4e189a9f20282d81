# SPDX-License-Identifier: Apache-2.0
"""Count collectives; upstream has ``CommDebugMode`` by this import path too."""

from typing import Any

from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode

__all__ = ["CommDebugMode"]


class CommDebugMode(TorchCommDebugMode):
    """torch's mode, which also looks inside operators on our DTensor.

    torch's lets an operator run into its collectives only for exactly its own DTensor type.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        types = tuple(TorchDTensor if issubclass(t, TorchDTensor) else t for t in types)
        return super().__torch_dispatch__(func, types, args, kwargs)
