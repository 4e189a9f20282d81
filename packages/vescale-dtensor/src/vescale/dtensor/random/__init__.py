# SPDX-License-Identifier: Apache-2.0
"""One stream of random numbers for all ranks: values of one device, however a tensor is cut.

Every number is a function of the generator's state and of its place in the whole tensor, so ranks
that are seeded alike draw the parts of one tensor, without communication.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor._torch_compat import DTensorSpec, TorchDTensor
from vescale.dtensor.random import fill as _fill
from vescale.dtensor.random.agreement import check_agreement
from vescale.dtensor.random.mode import get_mode, set_mode, turn_on, use_mode
from vescale.dtensor.random.operators import HANDLERS
from vescale.dtensor.random.parts import segments_of
from vescale.dtensor.random.samples import scope

__all__ = [
    "advance",
    "get_mode",
    "manual_seed",
    "scope",
    "segments",
    "set_mode",
    "turn_on",
    "use_mode",
]

_FILLS = {func._schema.name.removeprefix("aten::"): func for func in HANDLERS}
_FILLS |= {
    "bernoulli_": torch.ops.aten.bernoulli_.float,
    "random_": getattr(torch.ops.aten.random_, "from"),
}


def manual_seed(seed: int, mesh: DeviceMesh | None = None, check: bool = True) -> None:
    """Seed the generators of all devices, and let torch's DTensor draw as one device.

    It is ``torch.manual_seed(seed)`` and ``set_mode("device")``. With ``check=True`` the ranks of
    ``mesh`` (default: all) compare their seeds first, which is collective, and each raises
    ValueError when they differ; a rank outside of ``mesh`` takes no part. Raises TypeError for a
    seed that is no int, ValueError for one that needs more than 64 bits.
    """
    problem: str | None = None
    kind: type[Exception] = TypeError
    if isinstance(seed, bool) or not isinstance(seed, int):
        problem = f"manual_seed got seed={seed!r}, a {type(seed).__name__}; give an int"
    elif not -(2**63) <= seed < 2**64:
        problem, kind = (
            f"manual_seed got seed={seed}; give one from -2**63 to 2**64 - 1",
            ValueError,
        )
    if check:
        check_agreement(seed if problem is None else problem, mesh)
    if problem is not None:
        raise kind(f"{problem}, the same on every rank.")
    torch.manual_seed(seed)
    if get_mode() != "device":
        set_mode("device")


def segments(spec: DTensorSpec | TorchDTensor, rank: int | None = None) -> list[tuple[int, int]]:
    """Return what a rank holds of a DTensor, as (start, length) in elements of the whole tensor.

    Runs of the row-major whole tensor, in the order of the rank's own memory. ``rank`` is a global
    rank (default: this one); one outside of the mesh holds nothing. Without communication. Raises
    NotImplementedError for Partial.
    """
    spec = spec._spec if isinstance(spec, TorchDTensor) else spec
    mesh = spec.mesh
    if rank is None:
        return segments_of(spec, mesh.get_coordinate())
    places = (mesh.mesh == rank).nonzero().tolist()
    return segments_of(spec, places[0] if places else None)


def advance(
    op: str,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    args: Sequence[Any] = (),
    *,
    generator: torch.Generator | None = None,
) -> None:
    """Move the generator as the in-place fill ``op`` on a tensor of ``shape`` does.

    For a tensor that this rank does not have, such as of another pipeline stage: what is drawn
    afterwards is what one device draws that has it. ``op`` is a name such as "normal_", ``args``
    its arguments. On the CPU it takes no memory to speak of.
    """
    func = _FILLS.get(op) if op.endswith("_") else None
    if func is None:
        known = sorted(name for name in _FILLS if name.endswith("_"))
        raise ValueError(f"advance got op={op!r}; known are {', '.join(known)}.")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    _fill.advance(func, shape, dtype, torch.device(device), args, generator)
