# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  a case is a line
"""Wrong calls raise on all ranks, say what was given and what to do, and start no collective.

A case is (exception, words that its message must hold in this order, call). The calls get an
``Inputs``; all ranks make the same one. Afterwards the group still works.
"""

import copy
import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensors
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.utils._python_dispatch import TorchDispatchMode  # as torch's documentation has it

from testing.ranks import DEVICE
from vescale.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    empty,
    full,
    init_device_mesh,
    ones,
    rand,
    redistribute_many,
    zeros,
)
from vescale.dtensor import tensor as tensors
from vescale.dtensor.debug import sharding_table, visualize_sharding
from vescale.dtensor.placement import _StridedRaggedShard
from vescale.dtensor.state import full_state_dict

R, S, P = Replicate(), Shard(0), Partial()
UNITS = (1, 3, 2, 2)
CUT, OTHER, OWNER = (
    RaggedShard((0,), UNITS),
    RaggedShard((0,), (2, 2, 2, 2)),
    RaggedShard((), (0, 1, 0, 0)),
)
HALF, EVEN = RaggedShard((0,), (1, 3)), RaggedShard((0,), (1, 1))


@dataclass
class Inputs:
    """Tensors on two meshes of the same four ranks."""

    mesh: DeviceMesh
    square: DeviceMesh
    turned: DeviceMesh  # the same ranks as ``mesh``, in another order
    whole: torch.Tensor  # [8, 6]
    x: DTensor  # ragged on mesh
    other: DTensor  # cut differently
    shard: DTensor
    replica: DTensor
    block: DTensor  # (ragged, Shard(1)) on square
    far: DTensor  # ragged on turned
    wrong: torch_tensors.DTensor  # ragged, says torch's own function that made it uncut
    pending: DTensor  # (ragged, Partial) on square
    ints: DTensor


def make_inputs() -> Inputs:
    mesh = init_device_mesh(DEVICE, (4,))
    square = init_device_mesh(DEVICE, (2, 2))
    turned = DeviceMesh(DEVICE, [3, 2, 1, 0])
    whole = torch.arange(48.0, device=DEVICE).view(8, 6)

    def place(values, where, *placements):
        return distribute_tensor(values, where, placements, src_data_rank=None)

    terms = torch.ones(2 if square.get_coordinate()[0] == 0 else 6, 6, device=DEVICE)
    return Inputs(
        mesh,
        square,
        turned,
        whole,
        place(whole, mesh, CUT),
        place(whole, mesh, OTHER),
        place(whole, mesh, S),
        place(whole, mesh, R),
        place(whole, square, HALF, Shard(1)),
        place(whole, turned, CUT),
        torch_tensors.zeros(8, 6, device_mesh=mesh, placements=[CUT]),
        DTensor.from_local(terms, square, [HALF, P], shape=(8, 6)),
        DTensor.from_local(torch.ones(8, 6, dtype=torch.int64, device=DEVICE), mesh, [P]),
    )


class CountCollectives(TorchDispatchMode):
    """Count the collectives that reach a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor.__base__) for kind in types):
            return NotImplemented  # let it take its operators apart, in sight of this mode
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def spread(i: Inputs, *placements, whole=None, mesh=None, **options):
    return distribute_tensor(
        i.whole if whole is None else whole, mesh or i.mesh, placements, **options
    )


def wrap(i: Inputs, *placements, local=None, mesh=None, **options):
    local = i.x.to_local() if local is None else local
    return DTensor.from_local(local, mesh or i.mesh, placements, **options)


def op_out(i: Inputs):
    return torch.add(i.x, 1.0, out=torch.empty_like(i.other))


PLACEMENTS = {
    "dims are no prefix": (ValueError, "dims=(1,) prefix permute", lambda i: RaggedShard((1,), UNITS)),
    "dims are no ints": (TypeError, "dims=(0.5,) ints", lambda i: RaggedShard((0.5,), UNITS)),
    "dims are no sequence": (TypeError, "dims=0 (0,)", lambda i: RaggedShard(0, UNITS)),
    "a negative unit": (ValueError, "(1, -1, 2, 2) non-negative", lambda i: RaggedShard((0,), (1, -1, 2, 2))),
    "no units at all": (ValueError, "local_units=() positive sum", lambda i: RaggedShard((0,), ())),
    "only zero units": (ValueError, "(0, 0) positive sum", lambda i: RaggedShard((0,), (0, 0))),
    "units are fractions": (TypeError, "(0.5, 0.5) ints", lambda i: RaggedShard((0,), (0.5, 0.5))),
    "units are words": (TypeError, "('1', '3') ints", lambda i: RaggedShard((0,), ("1", "3"))),
    "units are one number": (TypeError, "local_units=4 per rank", lambda i: RaggedShard((0,), 4)),
    "a whole tensor has two owners": (ValueError, "dims=() (1, 1) one owner", lambda i: RaggedShard((), (1, 1))),
    "the split factor is no int": (TypeError, "split_factor=1.5 int", lambda i: _StridedRaggedShard((0,), UNITS, 1.5)),
    "rows are no multiple": (ValueError, "8 units (7, 6) 7 rows divides", lambda i: CUT.unit_numel((7, 6))),
    "a rank beyond the units": (ValueError, "4 ranks rank 9", lambda i: CUT.split((8, 6), 9)),
    "a shape of fewer dims": (ValueError, "(0, 1) (8,) at most 1", lambda i: RaggedShard((0, 1), UNITS).split((8,), 0)),
}  # fmt: skip
MAKING = {
    "rows do not divide": (ValueError, "8 units (7, 6) 7 rows", lambda i: spread(i, CUT, whole=i.whole[:7])),
    "units for another mesh": (ValueError, "2 units 4 ranks one unit count per rank", lambda i: spread(i, HALF)),
    "two ragged cuts": (ValueError, "mesh axes [0, 1] one RaggedShard", lambda i: spread(i, HALF, HALF, mesh=i.square)),
    "too few placements": (ValueError, "1 placements 2 axes one per axis", lambda i: spread(i, HALF, mesh=i.square)),
    "a word for a placement": (TypeError, "'ragged' RaggedShard", lambda i: spread(i, "ragged")),
    "a placement for a list": (TypeError, "RaggedShard(dims=(0,) list", lambda i: distribute_tensor(i.whole, i.mesh, CUT)),
    "Shard out of range": (ValueError, "dim=5 2-D", lambda i: spread(i, HALF, Shard(5), mesh=i.square)),
    "Partial beside ragged": (NotImplementedError, "P(sum) use Replicate", lambda i: spread(i, HALF, P, mesh=i.square)),
    "more dims than the tensor": (ValueError, "(0, 1, 2) (8, 6) at most 2", lambda i: spread(i, RaggedShard((0, 1, 2), UNITS))),
    "distribute a DTensor": (ValueError, "RaggedShard redistribute()", lambda i: spread(i, CUT, whole=i.x)),
    "distribute a DTensor plainly": (ValueError, "RaggedShard redistribute_many([x], redistribute()", lambda i: spread(i, S, whole=i.x)),
    "placements for the mesh": (TypeError, "RaggedShard before placements=[...]", lambda i: distribute_tensor(i.whole, [CUT])),
    "units do not fit where the shard is short": (ValueError, "2 units leave (3, 4) of (5, 4) on some ranks: 3 rows", lambda i: spread(i, EVEN, S, whole=torch.ones(5, 4, device=DEVICE), mesh=i.square)),
    "a factory, short shards": (ValueError, "2 units leave (3, 4) of (5, 4) on some ranks", lambda i: zeros(5, 4, device_mesh=i.square, placements=[EVEN, S])),
    "a random factory, short shards": (ValueError, "2 units leave (3, 4) of (5, 4) on some ranks", lambda i: rand(5, 4, device_mesh=i.square, placements=[EVEN, S])),
    "units that divide the whole only": (ValueError, "4 units leave (6, 8) of (12, 8) on some ranks: 6 rows", lambda i: zeros(12, 8, device_mesh=i.square, placements=[HALF, S])),
    "distribute a result": (ValueError, "leaf from_local", lambda i: spread(i, CUT, whole=i.whole.clone().requires_grad_() * 2)),
    "distribute a list": (TypeError, "list torch.tensor", lambda i: spread(i, CUT, whole=[1.0, 2.0])),
    "a word for a mesh": (TypeError, "'cpu' init_device_mesh", lambda i: distribute_tensor(i.whole, "cpu", [CUT])),
    "no mesh": (RuntimeError, "mesh device_mesh=", lambda i: distribute_tensor(i.whole, placements=[CUT])),
    "a source beyond the mesh": (ValueError, "src_data_rank=9 4", lambda i: spread(i, CUT, src_data_rank=9)),
    "a source beyond another axis": (ValueError, "src_data_rank=3 2", lambda i: spread(i, HALF, R, mesh=i.square, src_data_rank=3)),
    "a source that is no int": (TypeError, "src_data_rank='0' int", lambda i: spread(i, CUT, src_data_rank="0")),
    "from_local of a flat part": (ValueError, "flat elements shape=x.shape", lambda i: wrap(i, CUT)),
    "from_local cannot know the shape": (ValueError, "global shape shape=", lambda i: wrap(i, OWNER, local=i.whole)),
    "from_local of a wrong length": (ValueError, "(5,) 5 elements (8, 6) block of shape", lambda i: wrap(i, CUT, local=torch.ones(5, device=DEVICE), shape=(8, 6))),
    "from_local, not as torch cuts": (ValueError, "(3, 6) (2, 6) (8, 6) RaggedShard torch.chunk", lambda i: wrap(i, S, local=torch.ones(3, 6, device=DEVICE), shape=(8, 6), stride=(6, 1))),
    "from_local of a DTensor": (TypeError, "DTensor to_local()", lambda i: wrap(i, CUT, local=i.x, shape=(8, 6))),
    "from_local of a list": (TypeError, "list torch.tensor", lambda i: wrap(i, CUT, local=[1.0], shape=(8, 6))),
    "from_local, column-major": (ValueError, "(8, 6) (6, 1) (1, 8) contiguous", lambda i: wrap(i, CUT, shape=(8, 6), stride=(1, 8))),
    "from_local, rows not of units": (ValueError, "rows multiple shape=", lambda i: wrap(i, RaggedShard((0,), (2, 2, 2, 2)), local=torch.ones(3, 6, device=DEVICE))),
    "from_local, a gradient elsewhere": (ValueError, "2 placements 1 axes", lambda i: wrap(i, CUT, shape=(8, 6), grad_placements=[R, R])),
    "the constructor, a wrong length": (ValueError, "(5,) (8, 6) flat", lambda i: DTensor(torch.ones(5, device=DEVICE), i.x._spec, requires_grad=False)),
    "a spec, column-major": (ValueError, "(8, 6) contiguous", lambda i: tensors.ragged_spec(i.mesh, [CUT], (8, 6), torch.float32, (1, 8))),
    "set_local of another length": (ValueError, "(3,) length", lambda i: tensors.set_local(i.x, torch.ones(3, device=DEVICE))),
    "an unknown option": (TypeError, "['dtyp'] dtype", lambda i: zeros(8, 6, device_mesh=i.mesh, placements=[CUT], dtyp=torch.half)),
    "a sparse layout": (NotImplementedError, "sparse torch.strided", lambda i: ones(8, 6, device_mesh=i.mesh, placements=[CUT], layout=torch.sparse_coo)),
    "a negative size": (ValueError, "(-8, 6) negative", lambda i: empty(-8, 6, device_mesh=i.mesh, placements=[CUT])),
    "a size that is no int": (TypeError, "'8' ints", lambda i: zeros("8", device_mesh=i.mesh, placements=[CUT])),
    "a factory, rows do not divide": (ValueError, "8 units (9, 6)", lambda i: rand(9, 6, device_mesh=i.mesh, placements=[CUT])),
    "full without a mesh": (RuntimeError, "mesh device_mesh=", lambda i: full((8, 6), 1.0, placements=[CUT])),
}  # fmt: skip
MOVING = {
    "no placements": (ValueError, "placements per mesh axis", lambda i: i.x.redistribute()),
    "placements for the mesh, moving": (TypeError, "Replicate before placements=[...]", lambda i: i.x.redistribute([R])),
    "a placement for the mesh": (TypeError, "Replicate before placements=[...]", lambda i: i.x.redistribute(R)),
    "short shards": (ValueError, "2 units leave (3, 4) of (5, 4) on some ranks", lambda i: zeros(5, 4, device_mesh=i.square, placements=[R, S]).redistribute(placements=[EVEN, S])),
    "many, short shards": (ValueError, "2 units leave (3, 4) of (5, 4) on some ranks", lambda i: redistribute_many([zeros(5, 4, device_mesh=i.square, placements=[R, S])], [EVEN, S])),
    "many, one tensor": (TypeError, "list redistribute_many([x]", lambda i: redistribute_many(i.x, [R])),
    "many, one placement": (TypeError, "Replicate list", lambda i: redistribute_many([i.x], R)),
    "another mesh": (NotImplementedError, "another mesh full_tensor()", lambda i: i.x.redistribute(i.square, [R, R])),
    "the same ranks in another order": (NotImplementedError, "another mesh full_tensor()", lambda i: i.x.redistribute(i.turned, [R])),
    "too many placements": (ValueError, "2 placements 1 axes one per axis", lambda i: i.x.redistribute(placements=[R, R])),
    "move by a word": (TypeError, "'replicate' Replicate() one per mesh axis", lambda i: i.x.redistribute(placements=["replicate"])),
    "move to one placement": (TypeError, "Replicate list one per mesh axis", lambda i: i.x.redistribute(placements=R)),
    "move to Partial": (RuntimeError, "Partial redistribute to", lambda i: i.x.redistribute(placements=[P])),
    "move to Shard out of range": (ValueError, "dim=2 2-D", lambda i: i.x.redistribute(placements=[Shard(2)])),
    "move to units of another mesh": (ValueError, "2 units 4 ranks", lambda i: i.x.redistribute(placements=[HALF])),
    "move to two ragged cuts": (ValueError, "one RaggedShard", lambda i: i.block.redistribute(placements=[HALF, HALF])),
    "move to units that do not divide": (ValueError, "3 units 8 rows", lambda i: i.x.redistribute(placements=[RaggedShard((0,), (1, 1, 1, 0))])),
    "average ints": (NotImplementedError, "average int64 Partial('sum')", lambda i: DTensor.from_local(i.ints.to_local(), i.mesh, [Partial("avg")]).redistribute(placements=[CUT])),
    "maximum of complex numbers": (NotImplementedError, "complex64", lambda i: DTensor.from_local(i.whole.cfloat(), i.mesh, [Partial("max")]).redistribute(placements=[CUT])),
    "two reductions in one move": ((NotImplementedError, ValueError), "reduc", lambda i: DTensor.from_local(i.whole, i.square, [Partial("max"), P]).redistribute(placements=[HALF, R])),
    "a word for a dtype": (TypeError, "forward_dtype='bf16' torch.dtype", lambda i: i.x.redistribute(placements=[R], forward_dtype="bf16")),
    "a word for the dtype back": (TypeError, "backward_dtype='bf16' torch.dtype", lambda i: i.x.redistribute(placements=[R], backward_dtype="bf16")),
    "to_local, gradients elsewhere": (ValueError, "2 placements 1 axes", lambda i: i.x.clone().requires_grad_().to_local(grad_placements=[R, R])),
    "several steps at once, asynchronously": (NotImplementedError, "several steps async_op=False", lambda i: i.block.redistribute(placements=[R, HALF], async_op=True)),
    "many, one plain": (TypeError, "Tensor distribute_tensor", lambda i: redistribute_many([i.x, i.whole], [R])),
    "many, lists missing": (ValueError, "2 tensors 1 lists one for each", lambda i: redistribute_many([i.x, i.other], [[R]])),
    "many, another mesh": (NotImplementedError, "mesh= full_tensor()", lambda i: redistribute_many([i.x], [R], mesh=i.square)),
    "many, on two meshes": (ValueError, "1 placements 2 axes", lambda i: redistribute_many([i.x, i.block], [R])),
    "many, empty buckets": (ValueError, "bucket_bytes=0 at least one", lambda i: redistribute_many([i.x], [R], bucket_bytes=0)),
    "many, to Partial": (RuntimeError, "Partial redistribute to", lambda i: redistribute_many([i.x, i.other], [P])),
    "many, the last does not divide": (ValueError, "3 units 8 rows", lambda i: redistribute_many([i.x, i.other], [[R], [RaggedShard((0,), (1, 1, 1, 0))]])),
    "as_torch of a ragged tensor": (NotImplementedError, "RaggedShard redistribute to Shard", lambda i: i.x.as_torch()),
}  # fmt: skip
OPERATORS = {
    "matmul": (NotImplementedError, "aten.mm RaggedShard redistribute", lambda i: i.x @ i.replica.t()),
    "matmul on the right": (NotImplementedError, "aten.mm RaggedShard redistribute", lambda i: i.replica.t() @ i.x),
    "linear": (NotImplementedError, "aten.t RaggedShard redistribute full_tensor()", lambda i: torch.nn.functional.linear(i.replica, i.x)),
    "transpose": (NotImplementedError, "aten.t. RaggedShard redistribute", lambda i: i.x.t()),
    "index": (NotImplementedError, "aten.select RaggedShard redistribute", lambda i: i.x[0]),
    "cat": (NotImplementedError, "aten.cat RaggedShard redistribute", lambda i: torch.cat([i.x, i.x])),
    "softmax": (NotImplementedError, "softmax RaggedShard redistribute", lambda i: i.x.softmax(0)),
    "read a number": (NotImplementedError, "_local_scalar_dense RaggedShard redistribute", lambda i: float(spread(i, OWNER, whole=i.whole[:1, 0], src_data_rank=None))),
    "operands cut differently": (NotImplementedError, "(1, 3, 2, 2) (2, 2, 2, 2) cut differently redistribute", lambda i: i.x + i.other),
    "operands placed differently": (NotImplementedError, "RaggedShard Shard placed differently", lambda i: i.x + i.shard),
    "operands on other meshes": (NotImplementedError, "RaggedShard redistribute", lambda i: i.x + i.far),
    "a replica on another mesh": (NotImplementedError, "different meshes", lambda i: i.x + distribute_tensor(i.whole, i.square, [R, R], src_data_rank=None)),
    "a plain tensor": (NotImplementedError, "plain tensor (8, 6) implicit_replication", lambda i: i.x * i.whole),
    "a plain tensor on the left": (NotImplementedError, "plain tensor (8, 6) implicit_replication", lambda i: i.whole * i.x),
    "broadcasting the ragged one": (NotImplementedError, "(8, 6) repeated (2, 8, 6)", lambda i: i.x + zeros(2, 8, 6, device_mesh=i.mesh)),
    "out= cut differently": (NotImplementedError, "aten.add.out (2, 2, 2, 2) same placements", op_out),
    "write into a replica": (NotImplementedError, "aten.add_ written to", lambda i: i.replica.add_(i.x)),
    "write into a plain tensor": (NotImplementedError, "aten.add_ plain tensor (8, 6) load_full_state_dict", lambda i: i.whole.clone().add_(i.x)),
    "copy another shape": (NotImplementedError, "aten.copy_ RaggedShard", lambda i: i.x.copy_(zeros(3, 6, device_mesh=i.mesh))),
    "view of another size": (ValueError, "(7, 7) 48 elements", lambda i: i.x.view(7, 7)),
    "view across a Shard": (NotImplementedError, "(48,) Shard redistribute", lambda i: i.block.view(48)),
    "expand rows": (NotImplementedError, "(8, 6) repeated (2, 8, 6)", lambda i: i.x.expand(2, 8, 6)),
    "equal, cut differently": (NotImplementedError, "aten.equal cut alike", lambda i: torch.equal(i.x, i.other)),
    "square a pending sum": (NotImplementedError, "aten.mul Partial reduced redistribute", lambda i: i.pending * i.pending),
    "norm of a pending sum": (NotImplementedError, "Partial reduced redistribute", lambda i: torch._foreach_norm([i.pending])),
    "lists with a pending sum": (NotImplementedError, "Partial reduced redistribute", lambda i: torch._foreach_add([i.pending], 1.0)),
    "load a plain tensor": (NotImplementedError, "aten.copy_ plain tensor (8, 6) load_full_state_dict", lambda i: i.x.clone().copy_(i.whole)),
    "plain state, foreach": (NotImplementedError, "plain tensor (8, 6) load_full_state_dict", lambda i: torch._foreach_lerp_([i.whole], [i.x], 0.5)),
    "plain gradients, foreach": (NotImplementedError, "plain tensor (8, 6) load_full_state_dict", lambda i: torch._foreach_add([i.x], [i.whole])),
    "the remedy for other cuts": (NotImplementedError, "redistribute one to the placements of the other", lambda i: i.x + i.other),
    "lists cut differently": (NotImplementedError, "_foreach_add cut differently", lambda i: torch._foreach_add([i.x], [i.other])),
    "one tensor for a whole list": (NotImplementedError, "_foreach_mul replicated scalar", lambda i: torch._foreach_mul([i.x, i.x], i.other)),
    "squeeze in place": (NotImplementedError, "squeeze_ out-of-place", lambda i: i.replica.squeeze_(0)),
    "resize": (NotImplementedError, "resize_ RaggedShard redistribute", lambda i: i.x.resize_(2, 2)),
    "reduce a dim that is not there": (IndexError, "dimension 5 2 dims -2 to 1", lambda i: i.x.sum(5)),
    "reduce a dim from the end": (IndexError, "dimension -3 2 dims", lambda i: i.x.any(-3)),
    "reduce a dim twice": (RuntimeError, "[0, -2] twice", lambda i: i.x.mean((0, -2))),
    "extremes over a dim twice": (RuntimeError, "[0, 0] twice", lambda i: i.x.amax((0, 0))),
    "all over a dim twice": (RuntimeError, "[1, 1] twice", lambda i: torch.all(i.x, (1, 1))),
    "norm over a dim that is not there": (IndexError, "dimension 4", lambda i: torch.linalg.vector_norm(i.x, 2, 4)),
    "norm over a dim twice": (RuntimeError, "twice", lambda i: torch.linalg.vector_norm(i.x, 2, (1, 1))),
    "unsqueeze out of range": (IndexError, "dimension 9 -3 to 2", lambda i: i.x.unsqueeze(9)),
    "squeeze out of range": (IndexError, "dimension 5", lambda i: i.x.squeeze(5)),
    "view with two unknowns": (RuntimeError, "[-1, -1] one", lambda i: i.x.view(-1, -1)),
    "view with any length": (RuntimeError, "[0, -1] give it", lambda i: spread(i, RaggedShard((0,), UNITS), whole=i.whole[:0], src_data_rank=None).view(0, -1)),
    "a mean in ints": ((RuntimeError, NotImplementedError), "floating", lambda i: i.x.mean(dtype=torch.int64)),
    "a mean of ints": ((RuntimeError, NotImplementedError), "floating", lambda i: i.x.long().mean(0)),
    "another memory format": (NotImplementedError, "channels_last row-major redistribute", lambda i: i.x.view(8, 6, 1, 1).to(memory_format=torch.channels_last)),
    "round a pending sum": (NotImplementedError, "_to_copy Partial reduced redistribute", lambda i: i.pending.to(torch.int64)),
    "find what a pending sum overflows to": (NotImplementedError, "Partial finite redistribute", lambda i: torch._amp_foreach_non_finite_check_and_unscale_([i.x.clone(), i.pending.clone()], torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE))),
    "put by numbers": (NotImplementedError, "index_put_ mask redistribute", lambda i: i.x.clone().index_put_((torch.tensor([0], device=DEVICE),), torch.tensor(1.0, device=DEVICE))),
    "put by a mask of rows": (NotImplementedError, "index_put_ mask same shape redistribute", lambda i: i.x.clone().index_put_((i.x.sum(1) > 0,), torch.tensor(1.0, device=DEVICE))),
    "put many values": (NotImplementedError, "index_put_ one number redistribute", lambda i: i.x.clone().index_put_((i.x > 0,), torch.ones(47, device=DEVICE))),
    "median": (NotImplementedError, "median RaggedShard redistribute", lambda i: i.x.median()),
    "random numbers of ragged means": (NotImplementedError, "normal RaggedShard redistribute", lambda i: torch.normal(i.x, 1.0)),
}  # fmt: skip
OF_TORCH = {
    "torch's tensor to ragged": (NotImplementedError, "torch's own RaggedShard redistribute_many([x] adopt(x)", lambda i: i.shard.as_torch().redistribute(placements=[CUT])),
    "torch's tensor to ragged by position": (NotImplementedError, "torch's own RaggedShard redistribute_many([x] adopt(x)", lambda i: i.shard.as_torch().redistribute(i.mesh, [OWNER])),
    "torch's tensor to the strided name": (NotImplementedError, "torch's own _StridedRaggedShard redistribute_many", lambda i: i.shard.as_torch().redistribute(placements=[_StridedRaggedShard((0,), UNITS, 2)])),
    "adopt": (NotImplementedError, "RaggedShard torch's own class distribute_tensor", lambda i: tensors.adopt(i.wrong)),
    "move": (NotImplementedError, "RaggedShard torch's own class", lambda i: redistribute_many([i.x, i.wrong], [R])),
    "add on the left": (NotImplementedError, "RaggedShard torch's own class", lambda i: i.wrong + i.x),
    "add on the right": (NotImplementedError, "RaggedShard torch's own class", lambda i: i.x + i.wrong),
    "add to a replica": (NotImplementedError, "RaggedShard torch's own class", lambda i: i.replica + i.wrong),
    "add in place": (NotImplementedError, "RaggedShard torch's own class", lambda i: i.x.clone().add_(i.wrong)),
    "copy": (NotImplementedError, "RaggedShard torch's own class", lambda i: i.x.clone().copy_(i.wrong)),
    "copy to a shard": (NotImplementedError, "RaggedShard torch's own class", lambda i: i.shard.clone().copy_(i.wrong)),
    "equal": (NotImplementedError, "RaggedShard torch's own class", lambda i: torch.equal(i.x, i.wrong)),
    "lists": (NotImplementedError, "RaggedShard torch's own class", lambda i: torch._foreach_add([i.x], [i.wrong])),
    "the first list": (NotImplementedError, "RaggedShard torch's own class", lambda i: torch._foreach_add([i.x, i.wrong], [i.x, i.x])),
    "norms": (NotImplementedError, "RaggedShard torch's own class", lambda i: torch._foreach_norm([i.x, i.wrong])),
    "a full state": (NotImplementedError, "RaggedShard torch's own class", lambda i: full_state_dict({"a": i.x, "b": i.wrong})),
    "draw": (NotImplementedError, "RaggedShard torch's own class", lambda i: visualize_sharding(i.wrong)),
    "a table": (NotImplementedError, "RaggedShard torch's own class", lambda i: sharding_table(i.wrong)),
}  # fmt: skip
STORING = {
    "a module for a state": (TypeError, "Linear model.state_dict()", lambda i: full_state_dict(torch.nn.Linear(2, 2))),
    "a checkpoint of a pending sum": (ValueError, "w Partial redistribute checkpointing", lambda i: i.pending.__create_write_items__("w", i.pending)),
    "chunks of a pending sum": (ValueError, "Partial redistribute checkpointing", lambda i: i.pending.__create_chunk_list__()),
    "a chunk that is elsewhere": (ValueError, "w (7, 3) redistributed", lambda i: i.x.__get_tensor_shard__(MetadataIndex("w", torch.Size((7, 3))))),
    "copy a result": (RuntimeError, "deep-copied detach()", lambda i: copy.deepcopy(i.x.clone().requires_grad_() * 2)),
    "draw a plain tensor": (TypeError, "Tensor distribute_tensor", lambda i: visualize_sharding(i.whole)),
    "a table of a plain placement": (ValueError, "Shard visualize_sharding", lambda i: sharding_table(i.shard)),
}  # fmt: skip
CASES = {**PLACEMENTS, **MAKING, **MOVING, **OPERATORS, **OF_TORCH, **STORING}


def problem(call, inputs, kind, words):
    """Make one wrong call; return what is wrong with how it fails, or None."""
    with CountCollectives() as started:
        try:
            call(inputs)
        except Exception as error:
            found = error
        else:
            return "raised nothing"
    if started.names:
        return f"started {started.names}"
    if type(found) not in (kind if isinstance(kind, tuple) else (kind,)):
        return f"raised {found!r}, not {kind}"
    if not re.search(".*".join(map(re.escape, words.split())), str(found), re.DOTALL):
        return f"{words!r} is not in: {found}"
    return None


def check_cases(rank, world_size):
    inputs = make_inputs()
    before = inputs.x.to_local().clone()
    wrong = {
        name: problem(call, inputs, kind, words) for name, (kind, words, call) in CASES.items()
    }
    wrong = {name: text for name, text in wrong.items() if text}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
    assert torch.equal(inputs.x.to_local(), before)
    assert torch.equal(inputs.x.full_tensor(), inputs.whole)
    total = torch.ones(1, device=DEVICE)
    dist.all_reduce(total)
    assert total.item() == world_size


def test_wrong_calls_raise_everywhere_before_any_collective(run_ranks):
    assert len(CASES) >= 100
    run_ranks(check_cases, 4, exact=True)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_placement_needs_no_group_to_refuse(name):
    kind, words, call = PLACEMENTS[name]
    assert problem(call, None, kind, words) is None
