# SPDX-License-Identifier: Apache-2.0
"""AdamW8bit on any layout of whole blocks: the bits of one process, and no communication."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from testing.collectives import CountCollectives
from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, Replicate, Shard, init_device_mesh
from vescale.fsdp import Rows, fully_shard, granularity_for
from vescale.fsdp.optim import AdamW8bit
from vescale.fsdp.tiles import Tiling

# Tiles that fit, that do not, more dims, a bias, one below 4096 elements, a wide and a tall one.
SHAPES = [(96, 64), (100, 70), (4, 48, 40), (64, 16, 3, 3), (70,), (40, 40), (32, 200), (201, 33)]


def tensors_of(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in SHAPES]


def cut_for(shape, block, world_size, seed):
    """Return a ragged cut between blocks, with empty shards; anywhere for float32 state."""
    tiling = Tiling(shape, block)
    numel = torch.Size(shape).numel()
    band = tiling.band_numel if len(shape) > 1 and numel >= 4096 else 1
    generator = torch.Generator().manual_seed(seed)
    bands = -(-numel // band)
    edges = torch.randint(0, bands + 1, (world_size - 1,), generator=generator).sort()[0]
    edges = [min(edge * band, numel) for edge in [0, *edges.tolist(), bands]]
    units = [b - a for a, b in itertools.pairwise(edges)]
    return RaggedShard(tuple(range(len(shape))), units)


def part_of(full, mesh, placement):
    start, end = placement.split(full.shape, mesh.get_local_rank())
    local = full.reshape(-1)[start:end].clone()
    return DTensor.from_local(local, mesh, [placement], shape=full.shape, stride=full.stride())


def set_grads(params, fulls):
    for param, full in zip(params, fulls, strict=True):
        if isinstance(param, TorchDTensor):
            param.grad = part_of(full, param.device_mesh, param.placements[0])
        else:
            param.grad = full.clone()


def named(tensors):
    return [(f"w{i}", tensor) for i, tensor in enumerate(tensors)]


def assert_same_bits(params, references):
    for i, (param, reference) in enumerate(zip(params, references, strict=True)):
        whole = reference.detach()
        part = part_of(whole, param.device_mesh, param.placements[0]).to_local()
        assert torch.equal(param.to_local(), part), f"tensor {i}"


def check_bits(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    cases = [
        (torch.float32, {}),
        (torch.float32, {"block": 256, "weight_decay": 0.3}),
        (torch.bfloat16, {"stochastic_round": True}),
        (torch.bfloat16, {"stochastic_round": True, "seed": 1, "block": (16, 64)}),
    ]
    for seed, (dtype, options) in enumerate(cases):
        fulls = tensors_of(seed, dtype)
        references = [nn.Parameter(full.clone()) for full in fulls]
        cuts = [
            cut_for(shape, options.get("block", (32, 32)), world_size, seed * 10 + i)
            for i, shape in enumerate(SHAPES)
        ]
        params = [nn.Parameter(part_of(f, mesh, cut)) for f, cut in zip(fulls, cuts, strict=True)]
        ours, alone = AdamW8bit(named(params), **options), AdamW8bit(named(references), **options)
        with CountCollectives() as count:
            for step in range(3):
                grads = tensors_of(100 + step, dtype)
                set_grads(params, grads)
                set_grads(references, grads)
                ours.step()
                alone.step()
        assert count.total == 0
        assert_same_bits(params, references)
        for param, reference in zip(params, references, strict=True):
            mine, theirs = ours.state[param], alone.state[reference]
            assert list(mine) == list(theirs)
            for name in mine:
                if name == "step":
                    assert mine[name] == theirs[name] == 3
                    continue
                assert torch.equal(mine[name].full_tensor(), theirs[name])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_get_the_bits_of_one_process(run_ranks, world_size):
    """C1: any aligned layout and world size, stochastic rounding included; nothing is sent."""
    run_ranks(check_bits, world_size)


def check_layouts(rank, world_size):
    """fully_shard, Shard(0), replicas and whole owners; what does not fit is refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 160), nn.ReLU(), nn.Linear(160, 64)).to(DEVICE)
    reference = copy.deepcopy(model)
    mesh = init_device_mesh(DEVICE, (world_size,))
    fully_shard(model, mesh=mesh, granularity=granularity_for("adamw8bit"))
    optimizer = AdamW8bit(model.named_parameters(), lr=0.01)
    alone = AdamW8bit(reference.named_parameters(), lr=0.01)
    for step in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        model(x).square().mean().backward()
        for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
            whole.grad = param.grad.full_tensor()
        optimizer.step()
        alone.step()
        optimizer.zero_grad()
        alone.zero_grad()
        for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(param.full_tensor(), whole)

    full = torch.randn(64 * world_size, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    whole = nn.Parameter(full.clone())
    rows = nn.Parameter(
        DTensor.from_local(
            full.chunk(world_size)[rank].clone(), mesh, [Shard(0)], shape=full.shape, stride=(64, 1)
        )
    )
    owner = RaggedShard((), [0] * (world_size - 1) + [1])
    owned = nn.Parameter(part_of(full, mesh, owner))
    copies = nn.Parameter(DTensor.from_local(full.clone(), mesh, [Replicate()]))
    optimizer = AdamW8bit([whole, rows, owned, copies], block=(16, 32))
    for param in (whole, rows, owned, copies):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(rows.full_tensor(), whole)
    assert torch.equal(copies.to_local(), whole)
    assert torch.equal(owned.to_local(), whole.view(-1) if rank == world_size - 1 else whole[:0, 0])

    for cut, message in (
        (RaggedShard((0,), [1, 3]), r"'w' has shape \(100, 70\).*cut tiles of 32 x 32.*Rows\(n=32"),
        (RaggedShard((0, 1), [1, 6999]), "granularity_for.*state_bits=32"),
    ):
        misfit = nn.Parameter(part_of(tensors_of(0)[1], mesh, cut))
        with pytest.raises(ValueError, match=message):
            AdamW8bit([("w", misfit)])
        assert "exp_avg" in AdamW8bit([misfit], state_bits=32).state[misfit]
    with pytest.raises(ValueError, match=r"cut blocks of 256 elements.*Block\(dims=2, n=256\)"):
        AdamW8bit([misfit], block=256)
    columns = DTensor.from_local(
        torch.zeros(64, 64, device=DEVICE), mesh, [Shard(1)], shape=(64, 128), stride=(128, 1)
    )
    with pytest.raises(NotImplementedError, match=r"Shard\(dim=1\)"):
        AdamW8bit([nn.Parameter(columns)])


def test_layouts_that_fit_and_errors_for_those_that_do_not(run_ranks):
    """C6, second half: a misaligned placement raises with the FQN and the remedy."""
    run_ranks(check_layouts, 2, exact=True)


def check_replicas(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = nn.Linear(64, 96, bias=False).to(DEVICE)
    whole = nn.Parameter(model.weight.detach().clone())
    fully_shard(model, mesh=mesh, granularity=Rows(32))
    ours, alone = AdamW8bit(model.parameters()), AdamW8bit([whole])
    model(torch.ones(1, 64, device=DEVICE)).square().sum().backward()
    whole.grad = model.weight.grad.full_tensor()
    ours.step()
    alone.step()
    assert torch.equal(model.weight.full_tensor(), whole)
    scale = ours.state[model.weight]["exp_avg_scale"]
    assert torch.equal(scale.full_tensor(), alone.state[whole]["exp_avg_scale"])


def test_replicas_of_shards_stay_equal(run_ranks):
    run_ranks(check_replicas, 4, exact=True)


def test_state_kind_follows_from_the_global_shape_alone():
    params = [nn.Parameter(full) for full in tensors_of(0)]
    optimizer = AdamW8bit([{"params": params[:-1]}, {"params": params[-1:], "state_bits": 32}])
    kinds = ["exp_avg_codes" in optimizer.state[param] for param in params]
    assert kinds == [True, True, True, True, False, False, True, False]
    state = optimizer.state[params[1]]
    assert state["exp_avg_codes"].shape == (100, 70)
    assert state["exp_avg_scale"].shape == (4, 3)


def test_state_takes_two_bytes_per_parameter():
    """C2: at most 2.05 bytes per parameter, from the storages, on a transformer's shapes."""
    with torch.device("meta"):
        layer = nn.TransformerDecoderLayer(512, 8, 2048, batch_first=True)
        model = nn.Sequential(nn.Embedding(8192, 512), *(copy.deepcopy(layer) for _ in range(4)))
    model.to_empty(device=DEVICE)
    optimizer = AdamW8bit(model.parameters())
    nbytes = sum(
        value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
    )
    assert nbytes / sum(param.numel() for param in model.parameters()) <= 2.05


def test_fp32_state_follows_torch():
    fulls = tensors_of(0)
    params, references = ([nn.Parameter(full.clone()) for full in fulls] for _ in range(2))
    options = {"lr": 0.01, "weight_decay": 0.2, "maximize": True}
    ours, theirs = (
        AdamW8bit(params, state_bits=32, **options),
        torch.optim.AdamW(references, **options),
    )
    for step in range(4):
        grads = tensors_of(step)
        set_grads(params, grads)
        set_grads(references, grads)
        ours.step()
        theirs.step()
    for param, reference in zip(params, references, strict=True):
        torch.testing.assert_close(param, reference, rtol=1e-5, atol=1e-6)


def test_missing_gradients_strides_nans_closures_and_schedulers():
    fulls = tensors_of(0)
    params = [nn.Parameter(full.clone()) for full in fulls]
    turned = nn.Parameter(fulls[0].clone().t().contiguous().t())  # not contiguous
    optimizer = AdamW8bit([*params, turned], lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    set_grads(params, fulls)
    params[1].grad = None
    params[6].grad[3, 40] = torch.nan
    turned.grad = fulls[0].clone()
    version = params[0]._version
    assert optimizer.step(lambda: 2.5) == 2.5
    scheduler.step()
    assert params[0]._version > version
    assert torch.equal(params[1], fulls[1])
    assert [int(optimizer.state[p]["step"]) for p in params[:3]] == [1, 0, 1]
    assert torch.equal(turned, params[0])
    assert params[6].isnan().sum() == 1
    params[6].grad = torch.ones_like(params[6])
    optimizer.step()
    spoilt = params[6].isnan()  # its tile, no more
    assert spoilt[:, 32:64].all()
    assert spoilt.sum() == 32 * 32


def test_batches_of_any_size_give_the_same_bits(monkeypatch):
    results = []
    for size in (1 << 22, 1000):
        monkeypatch.setattr("vescale.fsdp.optim.adamw8bit_parts.BATCH_NUMEL", size)
        params = [nn.Parameter(full.bfloat16()) for full in tensors_of(0)]
        optimizer = AdamW8bit(params, stochastic_round=True)
        for seed in range(2):
            set_grads(params, [full.bfloat16() for full in tensors_of(seed)])
            optimizer.step()
        results.append(params)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_pickled_and_copied_optimizers_go_on():
    optimizer = AdamW8bit([nn.Parameter(full) for full in tensors_of(0)])
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        params = twin.param_groups[0]["params"]
        set_grads(params, tensors_of(1))
        twin.step()
        assert not torch.equal(params[0], optimizer.param_groups[0]["params"][0])


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.float32, {"lr": -1.0}, "lr=-1.0"),
        (torch.float32, {"betas": (0.9, 1.0)}, "betas"),
        (torch.float32, {"eps": float("nan")}, "eps=nan"),
        (torch.float32, {"block": 0}, "block=0"),
        (torch.float32, {"state_bits": 4}, "state_bits=4"),
        (torch.float64, {}, "parameter 0 of group 0 is torch.float64"),
        (torch.float16, {"stochastic_round": True}, "stochastic_round"),
    ],
)
def test_wrong_arguments_are_refused(dtype, options, message):
    with pytest.raises(ValueError, match=message):
        AdamW8bit([nn.Parameter(torch.zeros(64, 64, dtype=dtype))], **options)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_refused_group_leaves_the_optimizer_as_it_was():
    optimizer = AdamW8bit([nn.Parameter(torch.zeros(64, 64))])
    extra = nn.Parameter(torch.zeros(64, 64))
    for bad in ({"params": [extra, extra]}, {"params": [extra], "lr": -1.0}):
        with pytest.raises(ValueError, match=r"twice|lr"):
            optimizer.add_param_group(bad)
        assert len(optimizer.param_groups) == len(optimizer.state) == 1
    extra.grad = torch.eye(64).to_sparse()
    optimizer.add_param_group({"params": [extra]})
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
