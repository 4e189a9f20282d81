# SPDX-License-Identifier: Apache-2.0
"""Count collectives, and show which rank holds which part of a tensor."""

import itertools
from collections.abc import Iterator

from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.debug import visualize_sharding as torch_visualize_sharding

from vescale.dtensor.debug._comm_mode import CommDebugMode
from vescale.dtensor.layout import Box, make_layout
from vescale.dtensor.spec import base_block, check_is_ours, layout_of, ragged_layout_of
from vescale.dtensor.tensor import DTensor

__all__ = ["CommDebugMode", "sharding_table", "visualize_sharding"]


def visualize_sharding(dtensor: TorchDTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which rank holds which part of ``dtensor``, on the first rank of its mesh.

    A ragged layout is a table of ``sharding_table``; ``use_rich=True`` draws it with ``rich``.
    Plain placements are drawn by torch's own function, which needs ``tabulate`` or ``rich`` with
    ``matplotlib``.
    """
    if not isinstance(dtensor, TorchDTensor):
        raise TypeError(
            f"visualize_sharding shows DTensors, got a {type(dtensor).__name__}; make one with "
            "distribute_tensor first."
        )
    check_is_ours(dtensor)
    if layout_of(dtensor._spec) is None:
        plain = dtensor.as_torch() if isinstance(dtensor, DTensor) else dtensor
        torch_visualize_sharding(plain, header=header, use_rich=use_rich)
        return
    coordinate = dtensor.device_mesh.get_coordinate()
    if coordinate is None or any(coordinate):
        return
    if header:
        print(header)
    if use_rich:
        _print_rich(dtensor)
    else:
        print(sharding_table(dtensor))


def sharding_table(dtensor: TorchDTensor) -> str:
    """Return a table of the part of every rank of a ragged tensor, without communication.

    A part is a list of boxes in Python's slice notation; ``elements`` counts them. Raises
    ValueError for plain placements.
    """
    check_is_ours(dtensor)
    if layout_of(dtensor._spec) is None:
        raise ValueError(
            f"sharding_table shows ragged tensors, got one of {dtensor.placements}; use "
            "visualize_sharding."
        )
    rows = [("rank", "coordinate", "elements", "part"), *_parts(dtensor)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows)


def _parts(dtensor: TorchDTensor) -> Iterator[tuple[str, str, str, str]]:
    """Yield (rank, coordinate, elements, part) of every rank, as text."""
    spec, layout = dtensor._spec, ragged_layout_of(dtensor._spec)
    mesh, shape = spec.mesh, tuple(dtensor.shape)
    ranks = mesh.mesh
    for coordinate in itertools.product(*map(range, mesh.shape)):
        base_shape, offset = base_block(shape, spec.placements, mesh.shape, coordinate)
        place = coordinate[layout.axis]
        part = make_layout(layout.placement, layout.axis, base_shape, offset, place)
        boxes = " + ".join(map(_slices, part.boxes)) or "nothing"
        yield str(int(ranks[coordinate])), str(coordinate), str(part.numel), boxes


def _slices(box: Box) -> str:
    sides = zip(box.offset, box.shape, strict=True)
    return f"[{', '.join(f'{start}:{start + length}' for start, length in sides)}]"


def _print_rich(dtensor: TorchDTensor) -> None:
    from rich import print as rich_print  # optional: only when it is asked for
    from rich.table import Table

    table = Table("rank", "coordinate", "elements", "part")
    for row in _parts(dtensor):
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    rich_print(table)
