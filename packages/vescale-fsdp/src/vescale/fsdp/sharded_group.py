# SPDX-License-Identifier: Apache-2.0
"""Parameters that share dtype and mesh in their sharded form: views of one flat buffer.

The sharded form of a managed parameter is an ``nn.Parameter`` holding a RaggedShard DTensor whose
local data is a view of the buffer's shard; optimizers and checkpoints see it.
"""

import copy
import weakref
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from vescale.dtensor.spec import spec_with_dtype
from vescale.dtensor.tensor import local_of, set_local
from vescale.fsdp.block_scaled import BlockScaled
from vescale.fsdp.comm_options import CommOptions
from vescale.fsdp.data_mesh import DataMesh
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.inference import ordinary_tensors
from vescale.fsdp.lanes import LanePlan
from vescale.fsdp.managed import OWNER_ATTRIBUTE, Managed, plan_of
from vescale.fsdp.offload import CPU, HostCopies, check_home, host_copies, offloads
from vescale.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy, compute_dtype
from vescale.fsdp.reduction import ReduceOptions, Reduction
from vescale.fsdp.scaled_buffer import ScaledBuffer


class ShardedGroup:
    """Make the sharded form, copy it, move it and cast it."""

    def __init__(
        self,
        managed: list[Managed],
        data: DataMesh,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (has no fields)
        lanes: int | Literal["auto"] = "auto",
        gather_as: BlockScaled | None = None,
    ) -> None:
        first = managed[0].original
        self.name = ""
        self.parts: tuple[str, ...] = ()  # FQNs of the unit's modules, where it has several
        self.managed, self.data, self.device, self.policy = managed, data, device, policy
        self.offload, self.lanes, self.gather_as = offload, lanes, gather_as
        self.home = CPU if offloads(offload) else device  # of the shards; ``device`` computes
        self.mesh = data.mesh
        self.process_group: dist.ProcessGroup | None = data.shard_group
        self.dtype = first.dtype
        self.param_dtype = compute_dtype(self.dtype, policy)
        self.reduce_dtype = policy.reduce_dtype or self.param_dtype
        self.keep_over: int | None = None  # on how many ranks a copy stays cut after forward
        self.lent = False  # whether another unit's module uses one of the parameters
        self.keep_storage = False  # whether full parameters keep their memory for good
        self.reduce_options = ReduceOptions()
        self.comm = CommOptions()
        self.plan = self._make_plan()
        self._clear()

    def _make_plan(self) -> LanePlan:
        return plan_of(
            self.managed,
            self.data.shards,
            narrowest=self.narrowest_dtype(),
            gathered=self.param_dtype,
            lanes=self.lanes,
        )

    def _clear(self) -> None:
        """Begin without memory."""
        self.weights: DBuffer | None = None
        self.reduction: Reduction | None = None

    def twin(self, managed: list[Managed]) -> Self:
        """Return a group for copies of the parameters, laid out alike in memory of its own.

        ``managed`` are the copies, sharded alike; they become views of the new buffer, which
        takes their values. Gradients that wait for a reduction are not copied.
        """
        fresh = self._bare_twin(managed)
        fresh._new_weights(self.weights.shard.device, self.dtype)
        fresh.weights.allocate_shard()
        if not self.weights.shard.is_meta:
            fresh.weights.shard.copy_(self.weights.shard)
        views = fresh.weights.shard_views(fresh.weights.shard)
        for item, view in zip(managed, views, strict=True):
            set_local(item.sharded, item.form(view))
            item.local = local_of(item.sharded)
        return fresh

    def _bare_twin(self, managed: list[Managed]) -> Self:
        fresh = copy.copy(self)
        fresh.managed = managed
        fresh.reduce_options = copy.copy(self.reduce_options)
        fresh.comm = copy.copy(self.comm)
        fresh._clear()
        return fresh

    def narrowest_dtype(self) -> torch.dtype:
        """Return the narrowest dtype that the layout is used with."""
        dtypes = [self.dtype, self.param_dtype, self.reduce_dtype]
        if self.gather_as is not None:
            dtypes.append(self.gather_as.dtype)
        return min(dtypes, key=lambda d: d.itemsize)

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the group requires a gradient."""
        return any(item.sharded.requires_grad for item in self.managed)

    def shard(self) -> None:
        """Replace every original parameter by its sharded form; copies this rank's part only."""
        home = self.managed[0].original.device
        self._new_weights(home if home.type == "meta" else self.home, self.dtype)
        views = self.weights.shard_views(self.weights.allocate_shard())
        for index, (item, local) in enumerate(zip(self.managed, views, strict=True)):
            item.make_sharded(self.plan, index, self.weights.rank, local)
            # A tie to a module that is wrapped later is found through the original.
            setattr(item.original, OWNER_ATTRIBUTE, (weakref.ref(self), index))
            item.original = None

    def keep_after_forward(self, ranks: int) -> None:
        """Let ``release`` keep copies cut over ``ranks`` neighbours. Collective over these."""
        self.data.subgroup(ranks)
        self.keep_over = ranks

    def prepare_move(self) -> None:
        """Let ``Module._apply`` replace the parameters' memory.

        Raises RuntimeError while gradients wait for a reduction.
        """
        if self.reduction.waits:
            raise RuntimeError(
                f"the unit {self.name!r} holds gradients that no backward has reduced yet; end "
                "gradient accumulation (a backward with gradient sync and all-reduce, or "
                "reset_iter_state()) "
                "before moving or casting the model."
            )
        self.reduction.forget_results()  # torch swaps no tensor that has a weak reference

    @property
    def moved_alike(self) -> bool:
        """Whether the sharded parameters are of one device and dtype."""
        locals_ = [item.sharded_part() for item in self.managed]
        return len({(t.device, t.dtype) for t in locals_}) == 1

    def adopt_moved(self) -> None:
        """Bring the buffer back under parameters that ``Module._apply`` moved or cast.

        After ``to_empty``, ``to(device)``, ``to(dtype)`` or ``float()`` the sharded parameters hold
        memory of their own; their values are copied into one new shard of their new device and
        dtype and they become views of it again.
        """
        locals_ = [item.sharded_part().detach() for item in self.managed]
        device, dtype = locals_[0].device, locals_[0].dtype
        if any((t.device, t.dtype) != (device, dtype) for t in locals_):
            raise RuntimeError(
                f"parameters of the unit {self.name!r} are no longer of one device and dtype: "
                f"{sorted({f'{t.device} {t.dtype}' for t in locals_})}; move the unit as a whole."
            )
        shard = self.weights.shard
        check_home(self.offload, device, self.name)
        memory = shard.untyped_storage().data_ptr()
        if (device, dtype) == (shard.device, shard.dtype) and all(
            t.numel() == 0 or t.untyped_storage().data_ptr() == memory for t in locals_
        ):
            for item in self.managed:  # other tensors perhaps, but of the same memory
                item.local = local_of(item.sharded)
            return
        self._set_dtype(dtype)
        self._new_weights(device, dtype)
        views = self.weights.shard_views(self.weights.allocate_shard())
        for item, local, view in zip(self.managed, locals_, views, strict=True):
            if not local.is_meta:
                view.copy_(local.reshape(-1))
            item.spec = spec_with_dtype(item.spec, dtype)
            set_local(item.sharded, item.form(view))
            item.local = local_of(item.sharded)
            item.gathered = None

    def _set_dtype(self, dtype: torch.dtype) -> None:
        if dtype != self.dtype:
            self.dtype = dtype
            self.param_dtype = compute_dtype(dtype, self.policy)
            self.reduce_dtype = self.policy.reduce_dtype or self.param_dtype

    @ordinary_tensors
    def materialize(self) -> None:
        """Give a shard on the meta device real memory, of undefined contents."""
        if self.weights.device.type != "meta":
            return
        self._new_weights(self.home, self.dtype)
        views = self.weights.shard_views(self.weights.allocate_shard())
        for item, view in zip(self.managed, views, strict=True):
            set_local(item.sharded, item.form(view))
            item.local = local_of(item.sharded)

    def _new_weights(self, home: torch.device, dtype: torch.dtype) -> None:
        device, copies = home, None
        if offloads(self.offload) and home.type != "meta":
            device, copies = self.device, host_copies(self.offload, self.device)
        options: dict[str, Any] = {
            "dtype": dtype,
            "device": device,
            "full_dtype": self.param_dtype,
            "copies": copies,
            "collectives": self.comm.gathering(self.process_group, device),
        }
        if self.gather_as is None:
            self.weights = DBuffer(self.plan, self.process_group, **options)
        else:
            shapes = [item.block for item in self.managed]
            self.weights = ScaledBuffer(
                self.plan, self.process_group, form=self.gather_as, shapes=shapes, **options
            )
        self._new_reduction(device, dtype, copies)

    def _new_reduction(
        self, device: torch.device, dtype: torch.dtype, copies: HostCopies | None
    ) -> None:
        self.reduction = Reduction(
            self.managed,
            self.plan,
            self.data,
            self.reduce_options,
            dtype=dtype,
            reduce_dtype=self.reduce_dtype,
            device=device,
            copies=copies,
            collectives=self.comm.reducing(self.process_group, device),
        )

    def apply_comm(self) -> None:
        """Communicate as ``comm`` says, from the next collective on."""
        group, device = self.process_group, self.weights.device
        self.weights.collectives = self.comm.gathering(group, device)
        self.reduction.use(self.comm.reducing(group, device))
