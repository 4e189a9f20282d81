# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor
from vescale.dtensor.debug import CommDebugMode

UNITS = {2: [(1, 3), (0, 5), (1, 1)], 3: [(1, 0, 3), (0, 8, 0), (2, 1, 1)]}
UNITS |= {1: [(1,), (2,), (1,)], 4: [(2, 0, 1, 1), (0, 0, 1, 0), (1, 1, 1, 1)]}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ragged(mesh, wholes):
    return [
        distribute_tensor(t, mesh, [RaggedShard((0,), units)])
        for t, units in zip(wholes, UNITS[mesh.size()], strict=True)
    ]


def check_lists(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    s, t = ([numbers(8, 6, seed=3 * n + i) for i in range(3)] for n in range(2))
    x, y = ragged(mesh, s), ragged(mesh, t)
    scalar = torch.tensor(3.0, device=DEVICE)
    for function in (
        lambda a, b, c: torch._foreach_add(a, b, alpha=2),
        lambda a, b, c: torch._foreach_mul(a, 2.0),
        lambda a, b, c: torch._foreach_mul(a, c),
        lambda a, b, c: torch._foreach_div(a, [1.0, 2.0, 3.0]),
        lambda a, b, c: torch._foreach_sqrt(torch._foreach_abs(a)),
        lambda a, b, c: torch._foreach_addcdiv(a, b, [q.abs() + 1 for q in a], [1.0, 2.0, 3.0]),
        lambda a, b, c: torch._foreach_lerp(a, b, 0.3),
        lambda a, b, c: torch._foreach_pow(2.0, a),
        lambda a, b, c: torch._foreach_maximum(a, b),
    ):
        with CommDebugMode() as mode:
            found = function(x, y, scalar)
            function(x, y, distribute_tensor(scalar, mesh, [Replicate()], src_data_rank=None))
        assert mode.get_total_counts() == 0
        for z, source, expected in zip(found, x, function(s, t, scalar), strict=True):
            assert type(z) is DTensor
            assert z.placements == source.placements
            torch.testing.assert_close(z.full_tensor(), expected)
    for function in (
        lambda a, b: torch._foreach_add_(a, b),
        lambda a, b: torch._foreach_mul_(a, 0.5),
        lambda a, b: torch._foreach_copy_(a, b),
        lambda a, b: torch._foreach_zero_(a),
    ):
        before = [z.to_local().data_ptr() for z in x]
        function(x, y)
        function(s, t)
        assert [z.to_local().data_ptr() for z in x] == before
        for z, expected in zip(x, s, strict=True):
            torch.testing.assert_close(z.full_tensor(), expected)
    # Other specs with the same cut, replicated neighbours, plain tensors beside plain ones.
    x, s = ragged(mesh, t), [q.clone() for q in t]
    halves = [z.bfloat16() for z in x]
    renamed = distribute_tensor(
        t[0], mesh, [RaggedShard((0, 1), [6 * n for n in UNITS[world_size][0]])]
    )
    replica = distribute_tensor(t[2], mesh, [Replicate()])
    found = torch._foreach_add(x, [renamed, halves[1].float(), replica])
    for z, expected in zip(
        found, (2 * t[0], t[1] + t[1].bfloat16().float(), 2 * t[2]), strict=True
    ):
        torch.testing.assert_close(z.full_tensor(), expected)
    found = torch._foreach_add([t[0], x[1], replica], [t[0], x[1], replica])
    assert type(found[0]) is torch.Tensor
    torch.testing.assert_close(found[0], 2 * t[0])
    torch.testing.assert_close(found[1].full_tensor(), 2 * t[1])
    torch.testing.assert_close(found[2].full_tensor(), 2 * t[2])
    other = distribute_tensor(t[1], mesh, [Shard(1)])
    for wrong in (
        lambda: torch._foreach_add(x[:2], [x[1], other]),
        lambda: torch._foreach_add(x, [distribute_tensor(q, mesh, [Shard(0)]) for q in t]),
        lambda: torch._foreach_add([x[0], replica], [x[0], x[0]]),
        lambda: torch._foreach_add([x[0], replica], [x[0], t[0]]),
        lambda: torch._foreach_mul([x[0], DTensor.from_local(t[0], mesh, [Partial()])], 2.0),
        lambda: torch._foreach_mul(x, distribute_tensor(t[0], mesh, [Replicate()])),
        lambda: torch._foreach_add(x, t),
    ):
        with pytest.raises(NotImplementedError, match=r"redistribute|distribute_tensor"):
            wrong()


OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, "foreach fused loop"),
    (torch.optim.Adam, {"amsgrad": True}, "foreach fused loop"),
    (torch.optim.AdamW, {"weight_decay": 0.1}, "foreach fused loop"),
    (torch.optim.AdamW, {"maximize": True}, "loop"),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01)}, "loop fused"),
    (torch.optim.RMSprop, {}, "foreach loop"),
    (torch.optim.Adagrad, {}, "foreach fused loop"),
    (torch.optim.NAdam, {}, "foreach"),
    (torch.optim.Adamax, {}, "foreach"),
    (torch.optim.Rprop, {}, "foreach loop"),
    (torch.optim.RAdam, {}, "foreach"),
    (torch.optim.ASGD, {}, "foreach loop"),
    (torch.optim.Adadelta, {}, "foreach loop"),
]
WAYS = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "loop": {"foreach": False},
}


def check_optimizers(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    wholes = [numbers(8, 6, seed=n) for n in range(3)]
    for optimizer, options, ways in OPTIMIZERS:
        for way in [{}, *(WAYS[name] for name in ways.split())]:
            if options.get("lr") is not None:
                options["lr"] = options["lr"].to(DEVICE)
            expected = [torch.nn.Parameter(t.clone()) for t in wholes]
            found = [torch.nn.Parameter(x) for x in ragged(mesh, wholes)]
            a, b = (
                optimizer(params, **{"lr": 0.01, **options, **way}) for params in (expected, found)
            )
            for step in range(3):
                for index, (p, q) in enumerate(zip(expected, found, strict=True)):
                    p.grad = numbers(8, 6, seed=50 + index + step)
                    q.grad = distribute_tensor(p.grad, mesh, q.placements, src_data_rank=None)
                with CommDebugMode() as mode:
                    b.step()
                assert mode.get_total_counts() == 0
                a.step()
                if step == 1:
                    b.load_state_dict(copy.deepcopy(b.state_dict()))
            for p, q in zip(expected, found, strict=True):
                torch.testing.assert_close(q.full_tensor(), p)
            for state in b.state.values():
                for value in state.values():
                    assert (
                        not isinstance(value, torch.Tensor)
                        or value.ndim == 0
                        or type(value) is DTensor
                    )


def check_default_choice(rank, world_size):
    """``foreach=None`` chooses foreach where torch does for its own tensors (on CUDA)."""
    from torch.optim.optimizer import _default_to_fused_or_foreach
    from torch.utils._foreach_utils import _has_foreach_support

    mesh = init_device_mesh(DEVICE, (world_size,))
    params = ragged(mesh, [numbers(8, 6, seed=n) for n in range(3)])
    plain = [x.to_local() for x in params]
    assert _default_to_fused_or_foreach(params, False, False) == _default_to_fused_or_foreach(
        plain, False, False
    )
    assert _has_foreach_support(params, params[0].device)


def check_grad_scaler(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    for bad in (None, 0.0, float("inf"), float("nan")):
        params = [
            torch.nn.Parameter(x) for x in ragged(mesh, [numbers(8, 6, seed=n) for n in range(3)])
        ]
        before = [p.full_tensor().clone() for p in params]
        scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler.scale(torch.ones((), device=DEVICE))
        for p in params:
            p.grad = torch.ones_like(p) * 4
        if bad is not None and rank == world_size - 1:  # seen by one rank only
            params[2].grad.to_local()[0] = bad
        scaler.step(optimizer)
        scaler.update()
        finite = bad in (None, 0.0)
        assert scaler.get_scale() == (4.0 if finite else 2.0)
        for p, old in zip(params[:2], before[:2], strict=True):
            assert torch.equal(p.full_tensor(), old - 1 if finite else old)


def check_foreach(rank, world_size):
    check_lists(rank, world_size)
    check_default_choice(rank, world_size)
    check_grad_scaler(rank, world_size)
    if world_size == 3:
        check_optimizers(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_list_operators_and_optimizers_equal_those_of_one_process(run_ranks, world_size):
    run_ranks(check_foreach, world_size)
