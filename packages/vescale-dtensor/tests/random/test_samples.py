# SPDX-License-Identifier: Apache-2.0
"""One process plays every data parallel rank: its samples' numbers are those of the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate, Shard

from vescale.dtensor import RaggedShard, distribute_tensor, random
from vescale.dtensor.random.batch import Batch, active
from vescale.dtensor.random.samples import _Scope

SIZES = (2, 3, 1, 4)
CALLS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of heads": lambda x: F.dropout(x.repeat_interleave(3, 0), 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(torch.sigmoid(x)),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 5, 90),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "rand": lambda x: torch.rand(len(x), 1, 1) * x,  # as of whole layers that are dropped
    "randn": lambda x: torch.randn(x.shape, dtype=torch.float64),
    "randint": lambda x: torch.randint(3, 9, x.shape),
    "of no sample": lambda x: x + torch.rand(()),
    "attention": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], dropout_p=0.3
    ),
    "several": lambda x: F.dropout(x, 0.2) + torch.randn_like(x).exponential_(),
}


def scopes(dim=0):
    for rank, count in enumerate(SIZES):
        yield _Scope(Batch(dim, sum(SIZES[:rank]), count, sum(SIZES)))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_draw_what_the_whole_batch_draws(name, dtype):
    whole = torch.linspace(-2, 2, sum(SIZES) * 5 * 7).view(-1, 5, 7).to(dtype)
    torch.manual_seed(3)
    expected, state = CALLS[name](whole), torch.get_rng_state()
    parts = []
    for scope, x in zip(scopes(), whole.split(SIZES), strict=True):
        torch.manual_seed(3)
        with scope:
            parts.append(CALLS[name](x))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.cat(parts), expected)
    assert active() is None


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_fills_follow_the_memory_of_the_whole_batch(dim, order):
    shape = [5, 3, 4]
    shape[dim] = sum(SIZES)
    whole = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(3)])
    for call in (lambda x: F.dropout(torch.ones_like(x), 0.4), lambda x: x.normal_()):
        torch.manual_seed(3)
        expected = call(whole.clone())
        for rank, scope in enumerate(scopes(dim)):
            if SIZES[rank] == 1:  # torch forgets where such a dim lies
                continue
            mine = list(shape)
            mine[dim] = SIZES[rank]
            x = torch.empty([mine[d] for d in order]).permute([order.index(d) for d in range(3)])
            torch.manual_seed(3)
            with scope:
                found = call(x)
            assert torch.equal(found, expected.split(SIZES, dim)[rank])


def test_a_view_with_gaps_is_filled_as_such():
    whole = torch.zeros(sum(SIZES), 5, 6)
    torch.manual_seed(3)
    whole[..., :4].normal_()
    for rank, scope in enumerate(scopes()):
        x = torch.zeros(SIZES[rank], 5, 6)
        torch.manual_seed(3)
        with scope:
            x[..., :4].normal_()
        assert torch.equal(x, whole.split(SIZES)[rank])


def test_a_scope_knows_its_mesh(fake_group):
    fake_group(6)
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    expected = F.dropout(torch.ones(6, 4), 0.5)
    torch.manual_seed(3)
    with random.scope(mesh["dp"]):
        assert torch.equal(F.dropout(torch.ones(2, 4), 0.5), expected[:2])
        empty = F.dropout(torch.ones(0, 4), 0.5)
        assert empty.shape == (0, 4)
    torch.manual_seed(3)
    with random.scope(mesh, sizes=[1, 1, 1, 1, 1, 1]):
        assert torch.equal(F.dropout(torch.ones(1, 4), 0.5), expected[:1])
    # Parts of the part, on the other axis; and numbers that belong to no sample.
    with random.scope(mesh["dp"]):
        x = TorchDTensor.from_local(torch.ones(2, 2), mesh["tp"], [Shard(1)])
        torch.manual_seed(3)
        assert torch.equal(F.dropout(x, 0.5).to_local(), expected[:2, :2])
    with random.scope(mesh["dp"], dim=1):
        x = TorchDTensor.from_local(torch.zeros(2), mesh["tp"], [Shard(0)])
        torch.manual_seed(3)
        found = x.uniform_()
    torch.manual_seed(3)
    assert torch.equal(found.to_local(), torch.rand(4)[:2])


def test_mistakes_are_told(fake_group):
    fake_group(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for error, match, arguments, options in (
        (TypeError, "mesh=2, expected the DeviceMesh", (2,), {}),
        (ValueError, "dim=-1; give the dim of the samples", (mesh,), {"dim": -1}),
        (ValueError, r"sizes=\[1, 2\] for .*give each of its 4 ranks", (mesh,), {"sizes": [1, 2]}),
        (ValueError, r"sizes=\[1, -2\]", (mesh["dp"],), {"sizes": [1, -2]}),
        (ValueError, "without any does not draw", (mesh["dp"],), {"sizes": [0, 2]}),
        (ValueError, r"sizes=\[True", (mesh["dp"],), {"sizes": [True, 2]}),
    ):
        with pytest.raises(error, match=match):
            random.scope(*arguments, **options)
    with random.scope(mesh["dp"], sizes=[2, 3]):
        for call, error, match in (
            (lambda: F.dropout(torch.ones(3, 4)), ValueError, "holds the 2 samples of this rank"),
            (lambda: torch.randperm(4), NotImplementedError, "call it outside of the scope"),
            (lambda: torch.ones(2, 4).multinomial(2), NotImplementedError, "aten.multinomial"),
            (lambda: torch.normal(torch.ones(2, 3)), NotImplementedError, "aten.normal"),
            (lambda: nn.RReLU()(torch.ones(2, 3)), NotImplementedError, "rrelu_with_noise"),
        ):
            before = torch.get_rng_state()
            with pytest.raises(error, match=match):
                call()
            assert torch.equal(torch.get_rng_state(), before)
        x = torch.ones(2, 1, 4, 4)
        F.scaled_dot_product_attention(x, x, x)  # draws nothing
        ragged = distribute_tensor(
            torch.ones(4, 3), mesh["tp"], [RaggedShard((0,), (1, 3))], src_data_rank=None
        )
        with pytest.raises(NotImplementedError, match="ragged tensors are parameters"):
            ragged.normal_()
    with random.scope(mesh["dp"]):
        x = distribute_tensor(torch.ones(2, 2), mesh["tp"], [Replicate()], src_data_rank=None)
        assert F.dropout(x, 0.5).placements == (Replicate(),)
