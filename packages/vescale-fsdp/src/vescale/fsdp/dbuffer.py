# SPDX-License-Identifier: Apache-2.0
"""One flat storage for a planned group of tensors. Knows no module and no parameter.

With S = ``plan.shard_numel`` and N the number of ranks, in elements: a rank's ``shard`` is [S],
the ``full`` buffer is [N * S] and rank ``i`` owns ``full[i * S : (i + 1) * S]``. Every tensor of
the plan is one interval of ``full``, so a gathered tensor is a view of it and costs no copy.

The plan may have lanes: then both are cut in as many parts, and the above holds in each. A buffer
may also have a ``tail`` of T elements in each shard, to carry what is no tensor, and a tensor that
lies on several ranks may then be a few ``pieces``. ``slices`` has the numbers.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from vescale.fsdp._torch_compat import set_version, storage_references
from vescale.fsdp.collectives import Collectives, Pending
from vescale.fsdp.lanes import AnyPlan
from vescale.fsdp.offload import HostCopies
from vescale.fsdp.slices import Slices


class DBuffer:
    """A shard that lives on, and a full buffer whose memory exists only while it is needed.

    ``dtype`` is that of the shard; ``full_dtype`` (default: the same) that of the full buffer, and
    a gather casts the shard on its way. ``shard`` is None until it is set: a gradient buffer gets
    one from each reduction. Without a ``group``, or with one of one rank, nothing is communicated.
    With ``copies`` the shard lives on the host, and a gather brings it to ``device``.

    Memory of ``full`` is given back by shrinking its storage to nothing and comes back by growing
    it, so views that others hold (autograd's saved tensors) are valid again once it is gathered.
    """

    def __init__(
        self,
        plan: AnyPlan,
        group: dist.ProcessGroup | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        full_dtype: torch.dtype | None = None,
        tail: int = 0,
        collectives: Collectives | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        if plan.world_size != size:
            raise ValueError(
                f"the plan is for {plan.world_size} ranks, the process group has {size}; "
                "plan the buffer for the group it lives on."
            )
        self.plan, self.group, self.rank = plan, group, rank
        self.collectives = collectives or Collectives(group)
        self.dtype, self.full_dtype, self.device = dtype, full_dtype or dtype, device
        self.copies = copies
        self.slices = Slices(plan, tail)
        self.shard: torch.Tensor | None = None
        self._full: torch.Tensor | None = None
        self._full_lanes: list[torch.Tensor] = []  # views of it
        self._slots: list[torch.Tensor] | None = None  # this rank's parts of these
        self._cuts: tuple[list[int], list[int]] | None = None
        self._gathering: tuple[Pending | None, int | None] | None = None
        self._kept: tuple[torch.Tensor, Collectives] | None = None
        self._brought: torch.Event | None = None  # the copy of the shard to the device

    @property
    def full(self) -> torch.Tensor:
        """The full buffer [N * S]; raises RuntimeError while it has no memory."""
        if not self.has_full:
            raise RuntimeError("the full buffer has no memory; call allocate_full() first.")
        return self._full

    @property
    def has_full(self) -> bool:
        """Whether the full buffer has memory now."""
        return self._full is not None and (
            self._full.numel() == 0 or self._full.untyped_storage().nbytes() > 0
        )

    def allocate_shard(self) -> torch.Tensor:
        """Give the shard memory, filled with zeros so that padding is defined, and return it."""
        if self.copies is not None:
            self.shard = self.copies.allocate(self.slices.shard_numel, self.dtype).zero_()
        else:
            self.shard = torch.zeros(self.slices.shard_numel, dtype=self.dtype, device=self.device)
        return self.shard

    def allocate_full(self) -> torch.Tensor:
        """Give the full buffer memory of undefined contents, in one allocation, if it has none."""
        if self._full is None:
            # Not an inference tensor, also under torch.inference_mode: training may follow.
            with torch.inference_mode(False):
                self._full = torch.empty(
                    self.slices.full_numel, dtype=self.full_dtype, device=self.device
                )
                self._full_lanes = self._lanes_of(self._full, 2)
            self._references = storage_references(self._full)
        elif not self.has_full:
            self._full.untyped_storage().resize_(self._full.nbytes)
        return self._full

    def free_full(self) -> None:
        """Give the full buffer's memory back. Views stay valid objects without contents."""
        if self._full is not None:
            self._full.untyped_storage().resize_(0)

    @property
    def keeps(self) -> bool:
        """Whether ``keep`` left a part of the full buffer to gather from."""
        return self._kept is not None

    def keep(self, group: dist.ProcessGroup) -> None:
        """Copy this rank's part of the full buffer among ``group``, to gather from next time.

        ``group`` has K of the N ranks, which together keep everything: [N * S / K] each. The next
        gather takes place between them, and ends it.
        """
        numel = self.full.numel() // group.size()
        with torch.inference_mode(False), torch.no_grad():
            part = self.full.narrow(0, group.rank() * numel, numel).clone()
        self._kept = part, self.collectives.over(group)

    def drop_kept(self) -> None:
        """Forget what ``keep`` left."""
        self._kept = None

    def view(self, index: int) -> torch.Tensor:
        """Return tensor ``index``, flat [numel], as a view of the full buffer without a tail."""
        if self.slices.tail:
            raise RuntimeError("tensors of a buffer with a tail are no single view; use pieces().")
        request = self.plan.requests[index]
        return self.full.narrow(0, self.plan.offsets[index], request.numel)

    def pieces(self, start: int, numel: int) -> list[torch.Tensor]:
        """Return views of the full buffer that cover [start, start + numel) of the plan, in order.

        At most three, [n] or [ranks, n]; see ``Slices.pieces``.
        """
        return [
            self.full.narrow(0, piece.start, piece.numel)
            if piece.rows == 1
            else self.full.as_strided((piece.rows, piece.numel), (piece.stride, 1), piece.start)
            for piece in self.slices.pieces(start, numel)
        ]

    def tails(self) -> torch.Tensor:
        """Return what lies behind every rank's part of the last lane: [N, T], a view."""
        _, numel, start, length = self.slices.lanes[-1]
        parts = self.full.narrow(0, start, length).view(self.plan.world_size, numel)
        return parts[:, numel - self.slices.tail :]

    def shard_views(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's part of every tensor, flat, as views of ``shard`` [S + T].

        ``shard`` is the buffer's own or another of the same layout. One operator for all.
        """
        if self._cuts is None:
            self._cuts = self.slices.cuts(self.rank)
        sizes, place = self._cuts
        parts = shard.split(sizes)
        return [parts[at] for at in place]

    def full_views(self) -> int:
        """Return how many tensors are views of the full buffer now, or keep its memory else.

        A collective under way, or ended just now, counts too.
        """
        return storage_references(self._full) - self._references

    def all_gather(self, *, modified: bool = False) -> None:
        """Launch the gather of all shards into the full buffer, without a copy around it.

        One collective, or one for each lane in one launch.

        The backend reads the shard and writes where the tensors are used. Where the dtypes differ,
        the shard is cast once, straight into this rank's slot. What ``keep`` left is gathered
        instead, if anything. Call ``wait_gather`` before use.

        To autograd the full buffer is what it was, unless ``modified`` says that shards changed.
        """
        full = self.allocate_full()
        version, work = None if modified else full._version, None
        if full.numel() and self._kept is not None:
            source, collectives = self._kept
            work = collectives.all_gather(full, source)
        elif full.numel():
            inward = self.copies.inward() if self.copies is not None else nullcontext()
            with torch.no_grad(), inward:
                sources = self._sources()
                if self.plan.world_size > 1:
                    work = self.collectives.gather_lanes(self._full_lanes, sources)
        self._gathering = work, version

    def _sources(self) -> list[torch.Tensor]:
        """Return this rank's part of each lane to gather from: of the shard, or of the full buffer
        after it has been copied there."""
        parts = self._lanes_of(self.shard, 0)
        same = self.full_dtype == self.dtype and self.copies is None
        if same and self.plan.world_size > 1:
            return parts
        if self._slots is None:
            known = storage_references(self._full)
            self._slots = [self._full.narrow(0, *slot) for slot in self.slices.slots(self.rank)]
            self._references += storage_references(self._full) - known
        for slot, part in zip(self._slots, parts, strict=True):
            if self.copies is None:
                slot.copy_(part)
            else:
                self._brought = self.copies.to_device(slot, part)
        return self._slots

    def _lanes_of(self, flat: torch.Tensor, first: int) -> list[torch.Tensor]:
        """Return the lanes of a shard (``first`` 0) or full buffer (2): views, or itself if one."""
        if len(self.slices.lanes) == 1:
            return [flat]
        return [flat.narrow(0, *lane[first : first + 2]) for lane in self.slices.lanes]

    def settle(self) -> None:
        """Have the host wait until its shard has been read, so that it may be written."""
        if self._brought is not None:
            self._brought.synchronize()
            self._brought = None

    def wait_gather(self) -> None:
        """Wait for the gather under way, if any: the current stream does, where there is one."""
        if self._gathering is None:
            return
        (work, version), self._gathering = self._gathering, None
        if self._brought is not None:
            self.copies.await_inward(self._brought)
        if work is not None:
            work.wait()
        self._kept = None  # not before the gather has read it
        # Only now, because gloo counts its writes from a thread of its own.
        if version is None:
            increment_version(self._full)
        else:
            set_version(self._full, version)

    def reduce_scatter(self, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending | None:
        """Launch the reduction of the full buffer over the ranks into a new ``shard`` [S + T].

        One collective, or one for each lane in one launch. The full buffer must keep its memory,
        and the shard has no contents, until the returned work, if any, has been waited for.
        """
        self.shard = self.full.new_empty(self.slices.shard_numel)
        if self.plan.world_size == 1:
            self.shard.copy_(self.full)
        if self.plan.world_size == 1 or not self.slices.shard_numel:
            return None
        return self.collectives.reduce_lanes(self._lanes_of(self.shard, 0), self._full_lanes, op)
