# SPDX-License-Identifier: Apache-2.0
"""Let all ranks of a group see alike what one of them found wrong."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from vescale.fsdp._torch_compat import all_gather_flat, is_fake
from vescale.fsdp.phases import waiting

MESSAGE_BYTES = 2048
FIELDS = "; "  # between the fields of a line of a description


def agree(
    groups: dist.ProcessGroup | Sequence[dist.ProcessGroup],
    device: torch.device,
    what: str,
    description: str,
    error: Exception | None = None,
) -> None:
    """Raise on every rank if one has an ``error`` or their descriptions of ``what`` differ.

    ``groups`` are those of the axes of a mesh, the last axis first; together they connect all of
    its ranks. Costs one all-gather of 16 bytes per rank and axis, and more only to tell what is
    wrong. The rank with the error raises it as it is; the others raise RuntimeError with its
    message. Of descriptions the first line that differs is told, and where it has fields, divided
    by ``FIELDS``, only the first one and those that differ.
    """
    groups = [groups] if isinstance(groups, dist.ProcessGroup) else groups
    groups = [group for group in groups if group.size() > 1]
    if not groups or is_fake(groups[0], device):
        if error is not None:
            raise error
        return
    mine = torch.tensor([error is not None, _digest(description)], dtype=torch.int64, device=device)
    with waiting(f"check that all ranks {what} alike", group=groups[0]):
        everyone = _gather(mine, groups).tolist()
    failed = [rank for rank, (flag, _) in enumerate(everyone) if flag]
    odd = [rank for rank, (_, other) in enumerate(everyone) if other != everyone[0][1]]
    if failed:
        texts = _gather(_encode(str(error), device), groups)
        if error is not None:
            raise error
        rank = failed[0]
        raise RuntimeError(f"rank {rank} of the group cannot {what}: {_decode(texts[rank])}")
    if odd:
        first, other = _differing_fields(*_first_difference(description, odd[0], device, groups))
        raise RuntimeError(
            f"the ranks do not {what} alike; rank 0 and rank {odd[0]} of the group differ first "
            f"at: {first!r} and {other!r}. Build and wrap the model alike on every rank."
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


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)


def _first_difference(
    description: str, odd: int, device: torch.device, groups: Sequence[dist.ProcessGroup]
) -> tuple[str, str]:
    """Return the first line in which the rank ``odd`` differs from rank 0, of both. Collective."""
    lines = description.splitlines()
    count = int(_gather(torch.tensor([len(lines)], device=device), groups).max())
    lines += ["nothing"] * (count + 1 - len(lines))
    digests = torch.tensor([_digest(line) for line in lines], dtype=torch.int64, device=device)
    everyone = _gather(digests, groups)
    at = (everyone[odd] != everyone[0]).int().argmax()
    texts = _gather(_encode(lines[at], device), groups)
    return _decode(texts[0]), _decode(texts[odd])


def _differing_fields(first: str, other: str) -> tuple[str, str]:
    """Return two lines without the fields in which they are alike, but for the first field."""
    a, b = first.split(FIELDS), other.split(FIELDS)
    if len(a) != len(b):
        return first, other
    kept = [i for i in range(len(a)) if i == 0 or a[i] != b[i]]
    return FIELDS.join(a[i] for i in kept), FIELDS.join(b[i] for i in kept)


def agree_on_order(
    order: Sequence[int], total: int, group: dist.ProcessGroup, device: torch.device
) -> list[int]:
    """Return one order of 0 to ``total`` - 1 on every rank that keeps each rank's ``order``, where
    these do not contradict each other: then the first rank's holds.

    What no rank has follows the number before it. One all-gather of 8 bytes a number.
    """
    orders = [list(order)]
    if group.size() > 1 and not is_fake(group, device):
        row = torch.full((total,), -1, dtype=torch.int64)
        row[: len(order)] = torch.tensor(list(order), dtype=torch.int64)
        orders = [
            [n for n in other if n >= 0] for other in _gather(row.to(device), [group]).tolist()
        ]
    merged: list[int] = []
    known = set()
    for other in (*orders, range(total)):
        at = 0
        for number in other:
            if number not in known:
                merged.insert(at, number)
                known.add(number)
            at = merged.index(number) + 1
    return merged
