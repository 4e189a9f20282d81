# SPDX-License-Identifier: Apache-2.0
"""The cut parameters of one process group, their matrices, and the exchange of these."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vescale.dtensor.runs import locate
from vescale.fsdp._torch_compat import all_gather_flat
from vescale.fsdp.agreement import agree
from vescale.fsdp.optim.blocks import RowBlock, block_pieces
from vescale.fsdp.optim.cuts import Cut
from vescale.fsdp.optim.exchange import OwnerGather
from vescale.fsdp.optim.roots import Matrix, Piece, plan_roots
from vescale.fsdp.phases import waiting

logger = logging.getLogger("vescale.fsdp.optim")


@dataclass(frozen=True, slots=True)
class Member:
    """A cut parameter and the matrices in it; ``describe(block, pieces)`` returns one of these."""

    param: torch.Tensor
    cut: Cut
    blocks: tuple[RowBlock, ...]
    describe: Callable[[RowBlock, tuple[Piece, ...]], Matrix]


@dataclass(frozen=True, slots=True)
class Transfer:
    """How matrices travel: see ``OwnerGather``. Two thirds of the limit are one round's."""

    dtype: torch.dtype
    max_inflight_bytes: int
    batched: bool = False
    share_replicas: bool = True


class BlockGather:
    """Plan where the matrices of ``members``, cut over the same group, are solved.

    Collective: all ranks compare their plans; ``what`` names these in the error. Attributes:

        params: the parameters, one for each member.
        places: for each matrix the number of its parameter, its block, and where the local part of
            the parameter begins, in elements.
    """

    def __init__(self, members: Sequence[Member], transfer: Transfer, what: str) -> None:
        first = members[0].cut
        self.params = [member.param for member in members]
        self.group, self.device = first.group, first.device
        self.places: list[tuple[int, RowBlock, int]] = []
        matrices = []
        for number, member in enumerate(members):
            before, _ = locate(member.cut.runs, first.group.rank())
            pieces = block_pieces(member.blocks, member.cut.runs)
            for block, mine in zip(member.blocks, pieces, strict=True):
                self.places.append((number, block, before))
                matrices.append(member.describe(block, mine))
        replica_group = first.replica_group if transfer.share_replicas else None
        replicas = replica_group.size() if replica_group is not None else 1
        plan = plan_roots(matrices, first.group.size(), replicas)
        groups = [first.group] + ([replica_group] if replicas > 1 else [])
        sizes = f"{transfer.dtype} on the wire, {transfer.max_inflight_bytes} bytes in flight"
        agree(groups, first.device, what, f"{sizes}\n{plan.describe()}")
        if plan.advice and all(group.rank() == 0 for group in groups):
            logger.warning("%s: %s", what.removeprefix("plan "), plan.advice)
        self.exchange = OwnerGather(
            plan,
            first.group,
            dtype=transfer.dtype,
            device=first.device,
            replica_group=replica_group,
            max_nbytes=transfer.max_inflight_bytes * 2 // 3,
            batched=transfer.batched,
        )

    def local_piece(self, index: int) -> tuple[int, tuple[int, int]]:
        """Return the parameter's number, and (start, numel) of a matrix in its local memory."""
        number, block, before = self.places[index]
        own = self.exchange.own[index]
        return number, (block.start + own.start - before, own.numel)

    def gradient_flags(self) -> list[list[bool]]:
        """Return, for each rank of the group, which parameters have a gradient; collective."""
        flags = [param.grad is not None for param in self.params]
        mine = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        everyone = mine.new_empty(self.group.size() * len(flags))
        with waiting("exchange of which gradients an optimizer has", group=self.group):
            all_gather_flat(everyone, mine, group=self.group)
        return everyone.view(self.group.size(), len(flags)).tolist()
