# SPDX-License-Identifier: Apache-2.0
"""Count collectives of our DTensor."""

from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode

from vescale.dtensor._torch_compat import TorchDTensor


class CommDebugMode(TorchCommDebugMode):
    """torch's mode, which also looks inside operators on our DTensor.

    torch's lets an operator run into its collectives only for exactly its own DTensor type.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        types = tuple(TorchDTensor if issubclass(t, TorchDTensor) else t for t in types)
        return super().__torch_dispatch__(func, types, args, kwargs)
