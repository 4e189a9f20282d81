# SPDX-License-Identifier: Apache-2.0
"""Tensor subclasses that say themselves what is gathered of them, as FSDP2's extensions do.

``fsdp_pre_all_gather`` of this rank's rows returns plain tensors of any dtype and shape; all of
them travel in one gather of bytes, and ``fsdp_post_all_gather`` makes the parameter of the result.
The sharded form is what FSDP2 has: a DTensor on ``Shard(0)`` whose local data is the subclass.
"""

import inspect
import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from vescale.dtensor.tensor import local_of, make_ragged, ragged_spec, set_local
from vescale.fsdp._torch_compat import set_version
from vescale.fsdp.dbuffer import DBuffer
from vescale.fsdp.inference import ordinary_tensors
from vescale.fsdp.lanes import LanePlan
from vescale.fsdp.managed import OWNER_ATTRIBUTE
from vescale.fsdp.offload import check_home, host_copies
from vescale.fsdp.packed import Packing
from vescale.fsdp.param_group import ParamGroup, State, Taker
from vescale.fsdp.planner import Plan, Request, slice_align
from vescale.fsdp.ranges import profiled
from vescale.fsdp.saved_tensors import Watch

METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def has_extension(tensor: torch.Tensor) -> bool:
    """Tell whether the class of ``tensor`` has both methods."""
    return all(callable(getattr(type(tensor), name, None)) for name in METHODS)


def rows_of(tensor: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Return the rows of ``rank`` among ``size``, as ``torch.chunk`` cuts them; a view."""
    per = -(-tensor.shape[0] // size)
    start = min(rank * per, tensor.shape[0])
    return tensor.narrow(0, start, min(per, tensor.shape[0] - start))


def check_rows(fqn: str, param: torch.Tensor, size: int) -> None:
    """Raise unless the subclass can be cut between rows."""
    name = type(param).__name__
    if param.ndim == 0:
        raise ValueError(f"{fqn} is a {name} without dims, expected rows to cut; give it a dim.")
    try:
        with torch.no_grad():
            rows = [rows_of(param.detach(), size, rank).clone() for rank in (0, size - 1)]
    except Exception as error:
        raise NotImplementedError(
            f"{fqn} is a {name}, which cannot be cut between rows: detach(), narrow(0, start, "
            f"length) and clone() must return one, and raised {type(error).__name__}: {error}"
        ) from error
    for part in rows:
        if not has_extension(part) or part.shape[1:] != param.shape[1:]:
            raise NotImplementedError(
                f"{fqn} is a {name}, but rows of it are a {type(part).__name__} of shape "
                f"{tuple(part.shape)}; detach(), narrow(0, start, length) and clone() must return "
                f"a {name} of these rows."
            )


class ExtensionGroup(ParamGroup):
    """One parameter whose local data is such a subclass, cut in rows as FSDP2 cuts it."""

    def _clear(self) -> None:
        super()._clear()
        self._packing: Packing | None = None
        self._metadata: Any = None
        self._inner: tuple[torch.Tensor, ...] = ()
        self._modified = False

    def _make_plan(self) -> LanePlan:
        item, size = self.managed[0], self.data.shards
        rows = item.block[0]
        chunk = -(-rows // size) * math.prod(item.block[1:])
        # Where the rows allow it, every part starts on a multiple of 16 bytes.
        align = math.gcd(slice_align(self.narrowest_dtype().itemsize), chunk) or 1
        request = Request(item.fqn, item.block.numel(), max(chunk, 1))
        return LanePlan.of(Plan((request,), (0,), chunk, size, align))

    # --- the sharded form -------------------------------------------------------------------

    def shard(self) -> None:
        """Replace the original by its sharded form: this rank's rows, in memory of their own."""
        item = self.managed[0]
        original = item.original
        size, group = self.data.shards, self.process_group
        with torch.no_grad():
            rows = rows_of(original.detach(), size, group.rank() if group is not None else 0)
            local = rows.clone()
            if not original.is_meta:
                local = self._at_home(local)
        placements = self.data.placements(Shard(0))
        item.rows = True
        item.spec = ragged_spec(self.mesh, placements, tuple(original.shape), local.dtype)
        item.extras = {k: v for k, v in vars(original).items() if k in _own_attributes(original)}
        item.sharded = nn.Parameter(
            make_ragged(local, item.spec), requires_grad=original.requires_grad
        )
        item.local = local_of(item.sharded)
        vars(item.sharded).update(item.extras)
        item.register(item.sharded)
        self._new_weights(local.device, self.dtype)
        setattr(original, OWNER_ATTRIBUTE, (weakref.ref(self), 0))
        item.original = None

    def _at_home(self, local: torch.Tensor) -> torch.Tensor:
        local = local.to(self.home)
        copies = host_copies(self.offload, self.device)
        return local.pin_memory() if copies is not None and copies.pin else local

    def settle(self) -> None:
        """Wait for gradients on their way to the host."""
        self.reduction.settle()

    def twin(self, managed: list) -> "ExtensionGroup":
        """Return a group for a copy of the parameter, which has memory of its own already."""
        fresh = self._bare_twin(managed)
        item = managed[0]
        item.local = local_of(item.sharded)
        fresh._new_weights(item.local.device, self.dtype)
        return fresh

    def adopt_moved(self) -> None:
        """Take over what ``Module._apply`` made of the local data."""
        item = self.managed[0]
        local = local_of(item.sharded)
        check_home(self.offload, local.device, self.name)
        if local is item.local:
            return
        self._set_dtype(local.dtype)
        item.spec = ragged_spec(self.mesh, item.spec.placements, item.spec.shape, local.dtype)
        item.local, item.gathered = local, None
        self._packing, self._watch = None, None
        self._new_weights(local.device, local.dtype)

    @ordinary_tensors
    def materialize(self) -> None:
        """Give local data on the meta device real memory, of undefined contents."""
        item = self.managed[0]
        if item.local.is_meta:
            with torch.no_grad():
                set_local(item.sharded, self._at_home(torch.empty_like(item.local, device="cpu")))
            self.adopt_moved()

    def _new_weights(self, home: torch.device, dtype: torch.dtype) -> None:
        meta = home.type == "meta"
        device = home if meta else self.device
        self.weights = self._packed(0, device)
        copies = None if meta else host_copies(self.offload, device)
        self._new_reduction(device, dtype, copies)

    def _packed(self, nbytes: int, device: torch.device) -> DBuffer:
        size = self.data.shards
        plan = Plan((Request(self.managed[0].fqn, size * nbytes),), (0,), nbytes, size, 1)
        collectives = self.comm.gathering(self.process_group, device)
        return DBuffer(
            plan, self.process_group, dtype=torch.uint8, device=device, collectives=collectives
        )

    # --- gather and free --------------------------------------------------------------------

    def gather(self) -> None:
        """Launch the gather of what the subclass returns for this rank's rows."""
        if self.state is not State.SHARDED:
            return
        item = self.managed[0]
        if local_of(item.sharded) is not item.local:
            self.prepare_move()
            self.adopt_moved()
        self._check_not_meta()
        version = self._sharded_version()
        changed, self._version = version != self._version, version
        self._modified, self._gathered_before = self._gathered_before and changed, True
        with torch.inference_mode(False), torch.no_grad():
            inputs: tuple[torch.Tensor, ...] = ()
            error = None
            try:
                inputs, self._metadata = self._inputs()
            except Exception as caught:
                error = caught
            if self._packing is None:
                # Once: what the other ranks send is theirs to say, and so is a mistake.
                self._packing = Packing(item.fqn, inputs, error, self.process_group, self.device)
                self.weights = self._packed(self._packing.nbytes, self.device)
            elif error is not None:
                raise error
            self.weights.shard = self._packing.pack(inputs)
        with profiled("gather", self.name):
            self.weights.all_gather()
        self._enter(State.GATHERING)

    def _sharded_version(self) -> int:
        item = self.managed[0]
        return item.sharded._version + local_of(item.sharded)._version

    def _inputs(self) -> tuple[tuple[torch.Tensor, ...], Any]:
        item = self.managed[0]
        local: Any = item.local.to(self.device)
        mesh = self.mesh if self.data.replicate_axis is None else self._shard_mesh()
        pre = local.fsdp_pre_all_gather
        if len(inspect.signature(pre).parameters) == 1:
            result = pre(mesh)
        else:
            module = item.slots[0][0]()
            result = pre(mesh, item.spec.shape, item.spec.stride, module, self.policy)
        return result

    def _shard_mesh(self) -> Any:
        return self.mesh[self.mesh.mesh_dim_names[self.data.shard_axis]]

    def wait(self, holder: int) -> None:
        """Make the parameter usable by ``holder`` and put it into its modules."""
        self.gather()
        self.holders.add(holder)
        if self.state is State.GATHERING:
            with self._waiting("gather of the parameters"):
                self.weights.wait_gather()
            self._unpack()
            self._enter(State.GATHERED)
        self._put_gathered()

    def _unpack(self) -> None:
        item, packing = self.managed[0], self._packing
        with torch.inference_mode(False), torch.no_grad():
            outputs = packing.unpack(self.weights.full)
            self.weights.free_full()
            self.weights.shard = None
            dtype = self.param_dtype
            local: Any = item.local
            if item.gathered is None:
                whole, inner = local.fsdp_post_all_gather(outputs, self._metadata, dtype)
                self._inner = tuple(inner)
                self._make_whole(whole)
            else:
                written = (packing.memory, *self._inner, item.gathered)
                versions = [tensor._version for tensor in written]
                for tensor in self._inner:
                    storage = tensor.untyped_storage()
                    if not storage.nbytes():
                        storage.resize_(self._sizes[id(tensor)])
                local.fsdp_post_all_gather(outputs, self._metadata, dtype, out=item.gathered)
                if not self._modified:  # to autograd it is what it was
                    for tensor, version in zip(written, versions, strict=True):
                        set_version(tensor, version)
        if self._watch is None:
            self._watch = Watch(packing.memory, self.used_in_backward)
        self._watch.start()

    def _make_whole(self, whole: torch.Tensor) -> None:
        item = self.managed[0]
        if whole.shape != item.block:
            raise RuntimeError(
                f"{item.fqn}: fsdp_post_all_gather of {type(item.local).__name__} returned a "
                f"tensor of shape {tuple(whole.shape)}, expected {tuple(item.block)}: its outputs "
                "are the rows of all ranks, without padding."
            )
        self._sizes = {id(t): t.untyped_storage().nbytes() for t in self._inner}
        item.gathered = nn.Parameter(whole, requires_grad=False)
        vars(item.gathered).update(item.extras)
        if whole.is_floating_point():
            item.gathered.requires_grad_(True)  # a hook needs it
            item.gathered.register_post_accumulate_grad_hook(Taker(self, 0))
        item.gathered.requires_grad_(item.sharded.requires_grad)

    def _free(self, keep: bool = False) -> None:
        if self.state is State.SHARDED:
            return
        self.weights.wait_gather()
        self.weights.free_full()
        if self._watch is not None:
            self._watch.stop()
        # Else somebody may differentiate once more.
        if not self.second_order and not self.keep_storage:
            self._free_storage()
        self.second_order = False
        self._enter(State.SHARDED)
        self.managed[0].put_back()

    def _free_storage(self) -> None:
        if self._packing is not None:
            for tensor in (self._packing.memory, *self._inner):
                tensor.untyped_storage().resize_(0)


def _own_attributes(param: torch.Tensor) -> set[str]:
    """Return the names of the attributes that are not the subclass's own tensors and context."""
    if not hasattr(param, "__tensor_flatten__"):
        return {name for name in vars(param) if name != OWNER_ATTRIBUTE}
    inner, _ = param.__tensor_flatten__()
    plain = set(vars(param)) - set(inner) - {OWNER_ATTRIBUTE}
    return {name for name in plain if not isinstance(vars(param)[name], torch.Tensor)}
