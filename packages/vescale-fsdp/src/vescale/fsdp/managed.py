# SPDX-License-Identifier: Apache-2.0
"""One parameter under management: where it is, how it may be cut, and its two forms."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from vescale.dtensor import DTensorSpec, RaggedShard
from vescale.dtensor.tensor import local_of, make_ragged, ragged_spec
from vescale.fsdp.data_mesh import DataMesh
from vescale.fsdp.granularity import Granularity, unit_runs
from vescale.fsdp.lanes import AnyPlan, LanePlan, plan_lanes
from vescale.fsdp.parallel import Parallel
from vescale.fsdp.planner import Request, slice_align
from vescale.fsdp.policy import MixedPrecisionPolicy

OWNER_ATTRIBUTE = "_vescale_owner"  # on a parameter that a group replaced


@dataclass(eq=False)
class Managed:
    """One parameter: its places in modules, and its sharded and gathered forms.

    ``parallel`` says how it lies on a mesh of its own, and is None for a plain parameter; ``block``
    is the shape of the local part there, or of the parameter: what the data axis divides.
    """

    fqn: str
    slots: list[tuple[weakref.ref[nn.Module], str]]
    original: nn.Parameter | None
    granularity: Granularity
    data: DataMesh
    parallel: Parallel | None = None
    block: torch.Size = None
    spec: DTensorSpec = None
    local: torch.Tensor | None = None  # of the sharded form: a view of the shard
    sharded: nn.Parameter = None
    gathered: nn.Parameter | None = None
    extras: dict = field(default_factory=dict)
    kind: type[nn.Parameter] = nn.Parameter  # of the gathered form
    policy: MixedPrecisionPolicy | None = None  # of this parameter
    rows: bool = False  # the sharded form has rows, and is cut like torch's Shard(0)

    def __post_init__(self) -> None:
        if self.block is None:
            self.block = self._original_part().shape

    def _original_part(self) -> torch.Tensor:
        original: Any = self.original.detach()
        return original if self.parallel is None else original.to_local()

    @property
    def uneven(self) -> bool:
        """Whether other ranks of the parameter's own mesh divide a block of another shape."""
        return self.parallel is not None and self.parallel.uneven

    def sharded_part(self) -> torch.Tensor:
        """Return this rank's part of the sharded form, as ``to_local()`` does."""
        sharded: Any = self.sharded
        return sharded.to_local()

    def request(self) -> Request:
        """Return what the planner has to place."""
        block_numel = self.granularity.block_numel(self.block, fqn=self.fqn)
        return Request(self.fqn, self.block.numel(), block_numel)

    def twin(self, slots: list, sharded: nn.Parameter) -> "Managed":
        """Return the same for a copy of the parameter in other modules."""
        return replace(
            self,
            slots=slots,
            original=None,
            local=None,
            sharded=sharded,
            gathered=None,
            extras=dict(self.extras),
        )

    # --- the two forms ----------------------------------------------------------------------

    def make_sharded(self, plan: AnyPlan, index: int, rank: int, local: torch.Tensor) -> None:
        """Make the sharded form of the original, which is tensor ``index`` of ``plan``.

        ``local`` is this rank's part, flat, in the shard; it takes the original's values.
        """
        original, part = self.original, self._original_part()
        begin, _, numel = plan.local_range(index, rank)
        if numel and not original.is_meta:
            # reshape: a view of a contiguous parameter, a copy of any other (L8)
            local.copy_(part.reshape(-1)[begin : begin + numel])
        runs = unit_runs(plan, index, self.granularity.unit_numel(self.block, fqn=self.fqn))
        ragged = RaggedShard.from_runs(self.granularity.dims(self.block, fqn=self.fqn), runs)
        mesh, placements = self.data.mesh, self.data.placements(ragged)
        if self.parallel is not None:
            mesh = self.parallel.whole_mesh
            placements = (*placements, *self.parallel.other_placements)
        self.spec = ragged_spec(mesh, placements, tuple(original.shape), local.dtype)
        self.extras = {k: v for k, v in vars(original).items() if k != OWNER_ATTRIBUTE}
        if self.parallel is None:
            self.kind = type(original)
        self.sharded = nn.Parameter(
            make_ragged(self.form(local), self.spec), requires_grad=original.requires_grad
        )
        self.local = local_of(self.sharded)
        vars(self.sharded).update(self.extras)
        self.register(self.sharded)

    def form(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's part as the sharded form holds it: a view of ``flat``, [numel].

        Of the shape of ``block`` on a mesh that does not shard, for there it is no RaggedShard, and
        [rows, ...] for tensor subclasses.
        """
        if self.rows:
            return flat.view(-1, *self.block[1:])
        return flat.view(self.block) if self.data.shard_axis is None else flat

    def make_gathered(self, flat: torch.Tensor) -> nn.Parameter:
        """Make the gathered form over ``flat``, the parameter in the full buffer, and return it.

        Plain, or torch's DTensor on the parameter's own mesh. A subclass of nn.Parameter is kept,
        with the attributes of its instance.
        """
        view = flat.view(self.block)
        data = view if self.parallel is None else self.parallel.wrap(view)
        self.gathered = nn.Parameter(data, requires_grad=self.sharded.requires_grad)
        if self.kind is not nn.Parameter:  # its constructor is its own: not called once more
            self.gathered = data.detach().as_subclass(self.kind)
            self.gathered.requires_grad_(self.sharded.requires_grad)
        vars(self.gathered).update(self.extras)
        return self.gathered

    def take_gradient(self) -> torch.Tensor:
        """Return the gradient that autograd left on the gathered form, as a tensor of ``block``.

        The gathered form has none afterwards.
        """
        grad, self.gathered.grad = self.gathered.grad, None
        return grad if self.parallel is None else self.parallel.local_gradient(grad)

    # --- places -----------------------------------------------------------------------------

    def register(self, param: nn.Parameter) -> None:
        """Put ``param`` into every place, without the checks of ``setattr``."""
        for module_ref, name in self.slots:
            module = module_ref()
            if module is not None:
                module._parameters[name] = param

    def put_back(self) -> None:
        """Put the sharded form where the gathered one is. What others put there stays there."""
        for module_ref, name in self.slots:
            module = module_ref()
            if module is None or self.gathered is None:
                continue
            if module._parameters.get(name) is self.gathered:
                module._parameters[name] = self.sharded

    def check_registered(self) -> None:
        """Raise RuntimeError if somebody emptied one of the places, or put something else there."""
        for module_ref, name in self.slots:
            module = module_ref()
            if module is None:
                continue
            found = module._parameters.get(name)
            if found is not self.sharded and found is not self.gathered:
                done = "removed" if found is None else "replaced by another object"
                raise RuntimeError(
                    f"{self.fqn}: the parameter was {done} after fully_shard, as parametrizations "
                    "and weight_norm do too; do it before fully_shard, or replace the module that "
                    "holds it. To change values, copy them into the sharded parameter: "
                    "load_state_dict takes whole tensors; param.copy_ refuses plain ones and takes "
                    "vescale.dtensor.distribute_tensor(value, param.device_mesh, param.placements)."
                )


def plan_of(
    managed: Sequence[Managed],
    world_size: int,
    *,
    narrowest: torch.dtype,
    gathered: torch.dtype,
    lanes: int | Literal["auto"],
) -> LanePlan:
    """Return the plan of the parameters over ``world_size`` ranks, in ``lanes`` as asked for.

    Every rank's part starts on a multiple of 16 bytes in each dtype the layout is used with,
    ``narrowest`` being the narrowest of them. What lanes save is counted in ``gathered``.
    """
    align = slice_align(narrowest.itemsize)
    requests = [item.request() for item in managed]
    itemsize = gathered.itemsize
    return plan_lanes(requests, world_size, align=align, lanes=lanes, itemsize=itemsize)
