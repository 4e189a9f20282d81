# SPDX-License-Identifier: Apache-2.0
"""The parameters of one unit that share dtype and mesh, over one buffer.

A managed parameter has two forms. The sharded one is an ``nn.Parameter`` holding a RaggedShard
DTensor whose local data is a view of the buffer's shard; optimizers and checkpoints see it. The
gathered one is a view of the full buffer, plain or torch's DTensor on the parameter's own mesh; the
module computes with it.
"""

import copy
import enum
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from vescale.dtensor.spec import spec_with_dtype
from vescale.dtensor.tensor import local_of, set_local
from vescale.fsdp._torch_compat import call_untraced
from vescale.fsdp.agreement import agree
from vescale.fsdp.comm_options import CommOptions
from vescale.fsdp.data_mesh import DataMesh
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.managed import OWNER_ATTRIBUTE, Managed, plan_of
from vescale.fsdp.offload import CPU, HostCopies, check_home, host_copies, offloads
from vescale.fsdp.planner import Plan
from vescale.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy, compute_dtype
from vescale.fsdp.reduction import ReduceOptions, Reduction
from vescale.fsdp.saved_tensors import Watch


class State(enum.Enum):
    """Where a group's full parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class ParamGroup:
    """Shard, gather and reduce the parameters of one group; each change checks the state."""

    def __init__(
        self,
        managed: list[Managed],
        data: DataMesh,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (has no fields)
    ) -> None:
        first = managed[0].original
        self.name = ""
        self.parts: tuple[str, ...] = ()  # FQNs of the unit's modules, where it has several
        self.managed, self.data, self.device, self.policy = managed, data, device, policy
        self.offload = offload
        self.home = CPU if offloads(offload) else device  # of the shards; ``device`` computes
        self.mesh = data.mesh
        self.process_group: dist.ProcessGroup | None = data.shard_group
        self.dtype = first.dtype
        self.param_dtype = compute_dtype(self.dtype, policy)
        self.reduce_dtype = policy.reduce_dtype or self.param_dtype
        self.keep_over: int | None = None  # on how many ranks a copy stays cut after forward
        self.lent = False  # whether another unit's module uses one of the parameters
        self.reduce_options = ReduceOptions()
        self.comm = CommOptions()
        self.plan = self._make_plan()
        self._clear()

    def _make_plan(self) -> Plan:
        return plan_of(self.managed, self.data.shards, self.narrowest_dtype())

    def _clear(self) -> None:
        """Begin with nothing gathered, nothing reduced, and no memory."""
        self.state = State.SHARDED
        self.holders: set[int] = set()
        self.weights: DBuffer | None = None
        self.reduction: Reduction | None = None
        self._version = -1
        self._gathered_before = False
        self._watch: Watch | None = None
        self.second_order = False  # a backward that is differentiated itself has used it
        self._listener: weakref.WeakMethod | None = None
        self._taker: weakref.WeakMethod | None = None

    def twin(self, managed: list[Managed]) -> "ParamGroup":
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

    def _bare_twin(self, managed: list[Managed]) -> "ParamGroup":
        fresh = copy.copy(self)
        fresh.managed = managed
        fresh.reduce_options = copy.copy(self.reduce_options)
        fresh.comm = copy.copy(self.comm)
        fresh._clear()
        return fresh

    def listen(self, on_use: Callable[[], None], on_gradient: Callable[[], None]) -> None:
        """Call these bound methods, held weakly, when backward needs the full parameters, and when
        it has a gradient of one."""
        self._listener = weakref.WeakMethod(on_use)
        self._taker = weakref.WeakMethod(on_gradient)

    def used_in_backward(self) -> None:
        """Tell the unit that backward needs a tensor that lies in the full buffer."""
        method = self._listener() if self._listener is not None else None
        if method is not None:
            method()

    def narrowest_dtype(self) -> torch.dtype:
        """Return the narrowest dtype that the layout is used with."""
        return min((self.dtype, self.param_dtype, self.reduce_dtype), key=lambda d: d.itemsize)

    # --- the sharded form -------------------------------------------------------------------

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
        locals_ = [item.sharded.to_local() for item in self.managed]
        return len({(t.device, t.dtype) for t in locals_}) == 1

    def adopt_moved(self) -> None:
        """Bring the buffer back under parameters that ``Module._apply`` moved or cast.

        After ``to_empty``, ``to(device)``, ``to(dtype)`` or ``float()`` the sharded parameters hold
        memory of their own; their values are copied into one new shard of their new device and
        dtype and they become views of it again.
        """
        locals_ = [item.sharded.to_local().detach() for item in self.managed]
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
        self._watch = None
        device, copies = home, None
        if offloads(self.offload) and home.type != "meta":
            device, copies = self.device, host_copies(self.offload, self.device)
        self.weights = DBuffer(
            self.plan,
            self.process_group,
            dtype=dtype,
            device=device,
            full_dtype=self.param_dtype,
            copies=copies,
            collectives=self.comm.gathering(self.process_group, device),
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

    # --- gather and free --------------------------------------------------------------------

    @contextmanager
    def _naming_failures(self, what: str) -> Iterator[None]:
        """Say which unit waited when a collective fails, as it does after a rank died."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"the {what} of unit {self.name or '(root)'!r} failed on rank {dist.get_rank()}: "
                f"a rank may have died, or run another unit: {error}"
            ) from error

    @property
    def stale(self) -> bool:
        """Whether full parameters were gathered before the sharded ones changed."""
        return self.state is not State.SHARDED and self._version != self._sharded_version()

    def _check_same_unit(self, what: str) -> None:
        """With TORCH_DISTRIBUTED_DEBUG=DETAIL, raise on every rank if they are at other units.

        Else units of one size would quietly get each other's data.
        """
        if dist.get_debug_level() == dist.DebugLevel.DETAIL and self.process_group is not None:
            description = f"unit {self.name or '(root)'}, {self.plan.numel} elements"
            agree(self.process_group, self.device, what, description)

    def drop_stale(self) -> None:
        """Free full parameters that are stale."""
        if self.stale:
            self._free()

    def gather(self) -> None:
        """Launch the gather of the full parameters; a no-op if it is under way or done."""
        if self.state is not State.SHARDED:
            return
        if any(local_of(item.sharded) is not item.local for item in self.managed):
            # A submodule was moved, cast or materialised by itself.
            self.prepare_move()
            self.adopt_moved()
        self._check_not_meta()
        self._check_same_unit("gather")
        version = self._sharded_version()
        changed = version != self._version
        modified, self._gathered_before = self._gathered_before and changed, True
        if changed:
            self.weights.drop_kept()
        self._version = version
        with (
            torch.profiler.record_function(f"vescale.fsdp.gather {self.name}"),
            self._naming_failures("gather of the parameters"),
        ):
            self.weights.all_gather(modified=modified)
        if self._watch is None:
            self._watch = Watch(self.weights.full, self.used_in_backward)
        self._watch.start()
        self.state = State.GATHERING

    def _check_not_meta(self) -> None:
        if self.weights.device.type == "meta":
            raise RuntimeError(
                f"the unit {self.name!r} still has its parameters on the meta device; call "
                "model.to_empty(device=...) and initialise them, or load a checkpoint, first."
            )

    def wait(self, holder: int) -> None:
        """Make the full parameters usable by ``holder`` and put them into their modules."""
        self.gather()
        self.holders.add(holder)
        if self.state is State.GATHERING:
            with self._naming_failures("gather of the parameters"):
                self.weights.wait_gather()
            self.state = State.GATHERED
        if self.managed[0].gathered is None:
            self._make_gathered()
        self._put_gathered()

    def _put_gathered(self) -> None:
        for item in self.managed:
            item.check_registered()
            if item.gathered.requires_grad != item.sharded.requires_grad:
                item.gathered.requires_grad_(item.sharded.requires_grad)
            item.register(item.gathered)

    def release(self, holder: int, *, keep: bool = False) -> None:
        """Give the full parameters up for ``holder``; the last one frees their memory.

        ``keep`` then leaves a copy of them cut over ``keep_over`` neighbours only, if that is set,
        for the next gather.
        """
        self.holders.discard(holder)
        if not self.holders:
            self._free(keep)

    def _free(self, keep: bool = False) -> None:
        if self.state is State.SHARDED:
            return
        self.weights.wait_gather()
        self._watch.stop()
        # What a differentiated backward saves it saves outside of every forward: nobody could
        # bring it back, so the memory stays until that graph is gone.
        known = len(self.managed) + self._watch.views
        held = self.second_order and self.weights.full_views() > known
        if keep and self.keep_over is not None and self.weights.full.numel():
            self.weights.keep(self.data.subgroup(self.keep_over))
        if not held:
            self.second_order = False
            self.weights.free_full()
        self.state = State.SHARDED
        for item in self.managed:
            item.register(item.sharded)

    def _make_gathered(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for index, item in enumerate(self.managed):
                gathered = item.make_gathered(self.weights.view(index))
                if gathered.is_floating_point() or gathered.is_complex():
                    requires_grad = gathered.requires_grad
                    gathered.requires_grad_(True)  # a hook needs it; set back below
                    gathered.register_post_accumulate_grad_hook(Taker(self, index))
                    gathered.requires_grad_(requires_grad)

    def _sharded_version(self) -> int:
        # The shard's own also counts what is written past the parameters, through ``.data``.
        return self.weights.shard._version + sum(item.sharded._version for item in self.managed)

    # --- gradients --------------------------------------------------------------------------

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the group requires a gradient."""
        return any(item.sharded.requires_grad for item in self.managed)

    @property
    def has_gradients(self) -> bool:
        """Whether a reduction now would bring gradients on."""
        return self.reduction.due

    def take_gradient(self, index: int) -> None:
        """Move the gradient that autograd just left on a gathered parameter into the buffer."""
        method = self._taker() if self._taker is not None else None
        if method is not None:
            method()
        self.reduction.take(index, self.managed[index].take_gradient())

    def start_reduce(self) -> None:
        """Launch the reduction of the group's gradients."""
        with (
            torch.profiler.record_function(f"vescale.fsdp.reduce {self.name}"),
            self._naming_failures("reduction of the gradients"),
        ):
            self._check_same_unit("reduce")
            self.reduction.start()

    def advance_reduce(self) -> bool:
        """Launch the second collective of the reduction under way, if it has one.

        Returns whether ``finish_reduce`` has something to do.
        """
        with self._naming_failures("reduction of the gradients"):
            return self.reduction.advance()

    def finish_reduce(self) -> None:
        """Put the result of the reduction under way, if any, into the sharded ``.grad``."""
        with self._naming_failures("reduction of the gradients"):
            self.reduction.finish()

    def settle(self) -> None:
        """Wait for copies between host and device: then gradients are there, and shards may be
        written. Does nothing without offloading."""
        copies = self.weights.copies
        if copies is not None:
            self.weights.settle()
            self.reduction.settle()
            copies.settle()

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset the sharded gradients, whichever form the modules hold now."""
        for item in self.managed:
            grad = item.sharded.grad
            if grad is None:
                continue
            if set_to_none:
                item.sharded.grad = None
            else:
                grad.detach_().zero_()

    def reset(self, *, drop_gradients: bool) -> None:
        """Return to the state before a forward: nothing under way, nothing gathered.

        ``drop_gradients`` also forgets the gradients that wait for a reduction.
        """
        if drop_gradients:
            self.reduction.drop()
        self.finish_reduce()
        self.settle()
        self.holders.clear()
        self._free()
        self.weights.drop_kept()
        for item in self.managed:
            if item.gathered is not None:
                item.gathered.grad = None


class Taker:
    """Hook of a gathered parameter: hands its gradient to the group, which it does not own."""

    def __init__(self, group: ParamGroup, index: int) -> None:
        self._group, self._index = weakref.ref(group), index

    def __call__(self, param: nn.Parameter) -> None:
        group = self._group()
        if group is not None:
            call_untraced(group.take_gradient, self._index)


HOOKS = (Taker.__call__,)  # what autograd calls: nothing to compile
