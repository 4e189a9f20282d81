# SPDX-License-Identifier: Apache-2.0
"""Let all ranks of a group see alike what one of them found wrong."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from vescale.fsdp._torch_compat import all_gather_flat, is_fake

MESSAGE_BYTES = 2048


def agree(
    groups: dist.ProcessGroup | Sequence[dist.ProcessGroup],
    device: torch.device,
    what: str,
    description: str,
    error: Exception | None = None,
) -> None:
    """Raise on every rank if one has an ``error`` or their descriptions of ``what`` differ.

    ``groups`` are those of the axes of a mesh, the last axis first; together they connect all of
    its ranks. Costs one all-gather of 16 bytes per rank and axis, and a second one of 2 KiB only
    to tell the error. The rank with the error raises it as it is; the others raise RuntimeError
    with its message.
    """
    groups = [groups] if isinstance(groups, dist.ProcessGroup) else groups
    groups = [group for group in groups if group.size() > 1]
    if not groups or is_fake(groups[0], device):
        if error is not None:
            raise error
        return
    digest = int.from_bytes(hashlib.sha256(description.encode()).digest()[:8], signed=True)
    mine = torch.tensor([error is not None, digest], dtype=torch.int64, device=device)
    everyone = _gather(mine, groups).tolist()
    if all(flag == 0 and other == digest for flag, other in everyone):
        return
    text = str(error) if error is not None else description
    texts = [_decode(row) for row in _gather(_encode(text, device), groups)]
    if error is not None:
        raise error
    for rank, (flag, _) in enumerate(everyone):
        if flag:
            raise RuntimeError(f"rank {rank} of the group cannot {what}: {texts[rank]}")
    first, rank = texts[0], next(r for r, (_, d) in enumerate(everyone) if d != everyone[0][1])
    raise RuntimeError(
        f"the ranks do not {what} alike; rank 0 and rank {rank} of the group differ first at: "
        f"{_first_difference(first, texts[rank])}. Build and wrap the model alike on every rank."
    )


def agree_everywhere(
    meshes: Iterable[Sequence[dist.ProcessGroup]],
    device: torch.device,
    what: str,
    description: str,
    error: Exception | None = None,
) -> None:
    """Let the ranks of several meshes agree, one after the other, each given by its groups.

    Raises what any of them found, once the others have heard of it.
    """
    for groups in meshes:
        try:
            agree(groups, device, what, description, error)
        except Exception as caught:
            error = caught
    if error is not None:
        raise error


def _gather(row: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """Return the rows [n] of all ranks, [ranks, n], in the order of the mesh."""
    rows = row
    for group in groups:
        out = rows.new_empty(group.size() * rows.numel())
        all_gather_flat(out, rows, group=group)
        rows = out
    return rows.view(-1, row.numel())


def _encode(text: str, device: torch.device) -> torch.Tensor:
    data = text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _decode(row: torch.Tensor) -> str:
    return bytes(row.cpu().tolist()).rstrip(b"\0").decode(errors="replace")


def _first_difference(one: str, other: str) -> str:
    for left, right in zip(one.splitlines(), other.splitlines(), strict=False):
        if left != right:
            return f"{left!r} and {right!r}"
    return f"{len(one.splitlines())} and {len(other.splitlines())} lines of description"
