# SPDX-License-Identifier: Apache-2.0
"""Methods of a wrapped module that change how and when its parameters are gathered."""

from vescale.fsdp.arguments import check_bool
from vescale.fsdp.units import units_of


class GatherSettings:
    """Mixed into ``FSDPModule``."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether forward frees the full parameters, to gather them again in backward."""
        check_bool("reshard_after_forward", reshard_after_forward)
        check_bool("recurse", recurse)
        for unit in units_of(self, recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward frees the full parameters."""
        check_bool("reshard_after_backward", reshard_after_backward)
        check_bool("recurse", recurse)
        for unit in units_of(self, recurse):
            unit.reshard_after_backward = reshard_after_backward
