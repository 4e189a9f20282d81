# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor

UNSUPPORTED = {
    "matmul": lambda x: x @ x.clone().redistribute(placements=[Replicate()]).t(),
    "linear": lambda x: torch.nn.functional.linear(x, x),
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "index": lambda x: x[0],
    "slice": lambda x: x[1:3],
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "softmax": lambda x: torch.softmax(x, -1),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(),
    "argmax": lambda x: x.argmax(),
    "max with indices": lambda x: x.max(0),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "normal of a tensor": lambda x: torch.normal(x, 1.0),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
    "repeat": lambda x: x.repeat(2, 1),
    "gather": lambda x: x.gather(0, torch.zeros(1, 1, dtype=torch.long)),
    "tril": lambda x: x.tril(),
    "view as other dtype": lambda x: x.view(torch.int32),
    "resize": lambda x: x.resize_(2, 2),
    "foreach_max": lambda x: torch._foreach_max([x]),
    "svd": lambda x: torch.linalg.svd(x),
    "norm of a matrix": lambda x: torch.linalg.matrix_norm(x, "nuc"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_operators_name_themselves_and_the_remedy(fake_group, name):
    fake_group(4, rank=1)
    mesh = init_device_mesh(DEVICE, (4,))
    whole = torch.rand(8, 6, device=DEVICE)
    x = distribute_tensor(whole, mesh, [RaggedShard((0,), (1, 3, 2, 2))], src_data_rank=None)
    before = x.to_local().clone()
    with pytest.raises(NotImplementedError, match=r"aten\.\w+.* on .*RaggedShard.*redistribute"):
        UNSUPPORTED[name](x)
    assert torch.equal(x.to_local(), before)


def test_a_number_is_read_from_a_whole_tensor_only(fake_group):
    fake_group(2)
    mesh = init_device_mesh(DEVICE, (2,))
    x = distribute_tensor(torch.ones(1, device=DEVICE), mesh, [RaggedShard((0,), (0, 1))])
    for function in (float, bool, torch.Tensor.item):
        with pytest.raises(NotImplementedError, match="redistribute"):
            function(x)
    with pytest.raises(NotImplementedError, match=r"whole tensors.*Usual causes: an optimizer"):
        x.t()


def test_every_elementwise_operator_is_told_from_the_others_by_its_name(fake_group):
    """Operators that torch tags or names like elementwise ones, but that are none."""
    from vescale.dtensor.ops.dispatch import classify, refuse
    from vescale.dtensor.ops.foreach import foreach, foreach_inplace
    from vescale.dtensor.ops.pointwise import pointwise, pointwise_inplace, pointwise_out

    aten = torch.ops.aten
    for operator, handler in {
        aten.rrelu.default: refuse,
        aten.rrelu_.default: refuse,
        **({aten._foreach_mm.default: refuse} if hasattr(aten, "_foreach_mm") else {}),
        aten._foreach_add.Scalar_out: refuse,
        aten._fused_dropout.default: refuse,
        aten._fused_rms_norm.default: refuse,
        aten.bernoulli.p: refuse,
        aten.squeeze_.default: refuse,
        aten.t_.default: refuse,
        aten.__and__.Tensor: refuse,
        aten.add.Tensor: pointwise,
        aten.add_.Tensor: pointwise_inplace,
        aten.add.out: pointwise_out,
        aten.gt_.Scalar: pointwise_inplace,
        aten.masked_fill_.Scalar: pointwise_inplace,
        aten._foreach_add.List: foreach,
        aten._foreach_add_.List: foreach_inplace,
        aten._fused_adamw_.default: foreach_inplace,
        torch.ops.c10d.allreduce_.default: refuse,
    }.items():
        assert classify(operator) is handler, operator


def test_plain_placements_keep_torchs_results(run_ranks):
    run_ranks(check_plain, 2)


def check_plain(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    whole = torch.arange(64.0, device=DEVICE).view(8, 8)
    shard, replica = (distribute_tensor(whole, mesh, [p]) for p in (Shard(0), Replicate()))
    for function, expected, placement in (
        (lambda: shard @ replica, whole @ whole, Shard(0)),
        (lambda: replica @ replica, whole @ whole, Replicate()),
        (lambda: shard.t(), whole.t(), Shard(1)),
        (lambda: replica[1:3], whole[1:3], Replicate()),
        (lambda: torch.softmax(replica, 0), torch.softmax(whole, 0), Replicate()),
        (lambda: torch.stack([replica, replica]), torch.stack([whole, whole]), Replicate()),
        (lambda: replica.max(0).values, whole.max(0).values, Replicate()),
        (lambda: shard.add_(1), whole + 1, Shard(0)),
        (lambda: replica.add_(1), whole + 1, Replicate()),
        (lambda: torch.add(replica, 1, out=torch.empty_like(replica)), whole + 2, Replicate()),
    ):
        found = function()
        assert type(found) is DTensor
        assert found.placements == (placement,)
        assert torch.equal(found.full_tensor(), expected)
    assert replica.sum().item() == replica.to_local().sum()
    for x in (shard, replica):
        with pytest.raises(NotImplementedError, match=r"squeeze_.*out-of-place"):
            x.squeeze_(0)
    draws = distribute_tensor(whole, mesh, [Replicate()])
    assert torch.equal(draws.view(64).full_tensor(), whole.view(64))
    views = draws.view(64)
    views.zero_()
    assert not draws.full_tensor().any()
