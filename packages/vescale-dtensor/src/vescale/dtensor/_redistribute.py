# SPDX-License-Identifier: Apache-2.0
"""``redistribute_local_tensor`` by the import path of the first veScale."""

import torch

from vescale.dtensor._torch_compat import DTensorSpec, TorchDTensor, wrap
from vescale.dtensor.redistribute import (
    gradient_placements,
    redistribute_local,
    start_redistribute,
)
from vescale.dtensor.spec import ragged_axis

__all__ = ["redistribute_local_tensor"]


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    is_backward: bool = False,
) -> torch.Tensor:
    """Return this rank's part under the placements of ``target_spec``; not differentiable.

    With ``async_op=True`` the result waits on its first use. ``is_backward=True`` makes a Partial
    target Replicate, as gradients are placed. Collective over both specs' one mesh.

    Raises NotImplementedError for two meshes, and what ``DTensor.redistribute`` raises.
    """
    mesh, placements = current_spec.mesh, tuple(target_spec.placements)
    if target_spec.mesh != mesh:
        raise NotImplementedError(
            f"cannot redistribute from {mesh} to another mesh, {target_spec.mesh}; gather and "
            "distribute the tensor again."
        )
    if is_backward:
        placements = gradient_placements(placements)
    if not async_op:
        return redistribute_local(local_tensor, current_spec, placements)
    if ragged_axis(current_spec.placements) is None and ragged_axis(placements) is None:
        with torch.no_grad():
            x = wrap(TorchDTensor, local_tensor, current_spec, requires_grad=False)
            return x.redistribute(mesh, placements, async_op=True).to_local()
    return start_redistribute(local_tensor, current_spec, placements)
