# SPDX-License-Identifier: Apache-2.0
import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, distribute_tensor
from vescale.dtensor.tensor import adopt, make_ragged, ragged_spec, set_local

UNITS = {1: (4,), 2: (1, 3), 3: (1, 0, 3), 4: (2, 0, 1, 1)}


def numbers(*shape):
    return (torch.arange(float(torch.Size(shape).numel()), device=DEVICE) + 1).view(shape)


def check_local_parts(rank, world_size):
    mesh, whole, units = init_device_mesh(DEVICE, (world_size,)), numbers(8, 6), UNITS[world_size]
    ragged = [RaggedShard((0,), units)]
    first, rows = 2 * sum(units[:rank]), 2 * units[rank]
    block = whole[first : first + rows]
    x = distribute_tensor(whole, mesh, ragged)
    assert isinstance(x, TorchDTensor)
    assert (x.shape, x.dtype, x.stride()) == ((8, 6), torch.float32, (6, 1))
    assert x.device_mesh is mesh
    assert torch.equal(x.to_local(), block.reshape(-1))
    assert torch.equal(x.local_block(), block)
    assert x.local_block().data_ptr() == x.to_local().data_ptr()
    assert x.to_local().untyped_storage()._cdata == x._local_tensor.untyped_storage()._cdata
    assert f"local_units={units}" in repr(x)

    for local in (block.clone(), block.reshape(-1).clone(), block.t().contiguous().t()):
        y = DTensor.from_local(local, mesh, ragged, shape=(8, 6))
        assert torch.equal(y.full_tensor(), whole)
        shared = y.to_local().untyped_storage()._cdata == local.untyped_storage()._cdata
        assert shared == local.is_contiguous() or local.numel() == 0
    with pytest.raises(ValueError, match="gives this rank"):
        DTensor.from_local(numbers(1), mesh, ragged, shape=(8, 6))
    with pytest.raises(ValueError, match="gives this rank"):
        DTensor(numbers(1), x._spec, requires_grad=False)
    with pytest.raises(ValueError, match="row-major"):
        DTensor.from_local(block, mesh, ragged, shape=(8, 6), stride=(1, 8))
    with pytest.raises(TypeError, match="got a DTensor"):
        DTensor.from_local(x, mesh, ragged, shape=(8, 6))
    if 0 in units:
        with pytest.raises(ValueError, match="pass shape="):
            DTensor.from_local(block, mesh, ragged)
    else:
        assert torch.equal(DTensor.from_local(block, mesh, ragged).full_tensor(), whole)
        with pytest.raises(ValueError, match="pass shape="):
            DTensor.from_local(block, mesh, [RaggedShard((0, 1), units)])

    owner = [RaggedShard((), (*(0 for _ in units[1:]), 1))]
    x = distribute_tensor(whole, mesh, owner)
    assert x.local_block().shape == ((8, 6) if rank == world_size - 1 else (0, 6))
    plain = distribute_tensor(whole, mesh, [Shard(0)])
    assert type(plain) is DTensor
    assert plain.local_block().shape == plain.to_local().shape
    assert torch.equal(
        DTensor.from_local(
            plain.to_local(), mesh, [Shard(0)], shape=(8, 6), stride=(6, 1)
        ).full_tensor(),
        whole,
    )


def check_run_check(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, world_size // 2))
    ragged = [RaggedShard((0,), (1, 3)), Replicate()]
    row, column = mesh.get_coordinate()
    local = numbers(8, 6).view(4, 12)[:1] if row == 0 else numbers(8, 6).view(4, 12)[1:]
    x = DTensor.from_local(local + 100 * column, mesh, ragged, shape=(8, 6), run_check=True)
    assert torch.equal(x.full_tensor(), numbers(8, 6))
    with torch.inference_mode():
        assert torch.equal(x.full_tensor(), numbers(8, 6))


def check_copies(rank, world_size):
    mesh, whole = init_device_mesh(DEVICE, (world_size,)), numbers(8, 6)
    ragged = [RaggedShard((0,), UNITS[world_size])]
    param = torch.nn.Parameter(distribute_tensor(whole, mesh, ragged))
    param.grad = param.detach() * 2
    param.note = "kept"
    twin = copy.deepcopy(param)
    assert isinstance(twin, torch.nn.Parameter)
    assert type(twin) is DTensor
    assert twin.requires_grad
    assert twin.note == "kept"
    assert torch.equal(twin.grad.full_tensor(), 2 * whole)
    twin.data.zero_()
    assert torch.equal(param.full_tensor(), whole)
    layer = torch.nn.Linear(6, 8, bias=False)
    layer.weight = param
    layer.tied = layer.weight
    other = copy.deepcopy(layer)
    assert other.tied is other.weight
    other.load_state_dict({name: value * 3 for name, value in layer.state_dict().items()})
    assert torch.equal(other.weight.full_tensor(), 3 * whole)
    assert torch.equal(copy.deepcopy(param.detach()).full_tensor(), whole)

    for value in (param, param.detach(), param.detach().redistribute(mesh, [Shard(0)])):
        loaded = pickle.loads(pickle.dumps(value))
        file = io.BytesIO()
        torch.save({"x": value}, file)
        for weights_only in (True, False):
            file.seek(0)
            again = torch.load(file, weights_only=weights_only)["x"]
            for result in (loaded, again):
                assert type(result) is DTensor
                assert result.placements == value.placements
                assert result.requires_grad == value.requires_grad
                assert torch.equal(result.to_local(), value.to_local())
            assert torch.equal((again + 1).to_local(), value.to_local() + 1)


def check_parameters(rank, world_size):
    mesh, whole = init_device_mesh(DEVICE, (world_size,)), numbers(8, 6)
    ragged = [RaggedShard((0,), UNITS[world_size])]
    param = torch.nn.Parameter(distribute_tensor(whole, mesh, ragged))
    assert isinstance(param.to_local(), torch.nn.Parameter)
    with torch.no_grad():
        assert isinstance(param.to_local(), torch.nn.Parameter)
        assert not isinstance(param.detach().to_local(), torch.nn.Parameter)
        assert param.detach().to_local().data_ptr() == param.to_local().data_ptr()
    calls = []
    param.register_hook(lambda grad: calls.append(type(grad)))
    param.register_post_accumulate_grad_hook(lambda p: calls.append(p is param))
    (param * 3).to_local().sum().backward()
    assert calls == [DTensor, True]
    assert type(param.grad) is DTensor
    assert param.grad.placements == param.placements
    assert torch.equal(param.grad.full_tensor(), torch.full_like(whole, 3))
    assert param.requires_grad_(False) is param
    assert not param.requires_grad
    a, b = (torch.nn.Parameter(distribute_tensor(whole * n, mesh, ragged)) for n in (1, 2))
    torch.utils.swap_tensors(a, b)
    assert torch.equal(a.full_tensor(), whole * 2)
    assert torch.equal((a + b).full_tensor(), whole * 3)
    assert torch.equal(a.data.full_tensor(), whole * 2)


def check_as_torch(rank, world_size):
    mesh, whole = init_device_mesh(DEVICE, (world_size,)), numbers(8, 6)
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    stock = x.as_torch()
    assert type(stock) is TorchDTensor
    assert stock.to_local().data_ptr() == x._local_tensor.data_ptr()
    (stock * 2).to_local().sum().backward()
    assert type(x.grad) is DTensor
    assert torch.equal(x.grad.full_tensor(), torch.full_like(whole, 2))
    assert adopt(x) is x
    assert type(adopt(stock.detach())) is DTensor
    with pytest.raises(NotImplementedError, match="redistribute to Shard"):
        distribute_tensor(whole, mesh, [RaggedShard((0,), UNITS[world_size])]).as_torch()
    mixed = x.detach() + stock.detach()
    assert type(mixed) is DTensor
    assert torch.equal(mixed.full_tensor(), whole * 2)
    partial = DTensor.from_local(whole, mesh, [Partial()]).redistribute(mesh, [Replicate()])
    assert torch.equal(partial.to_local(), whole * world_size)


def check_tensor(rank, world_size):
    check_local_parts(rank, world_size)
    check_copies(rank, world_size)
    check_parameters(rank, world_size)
    check_as_torch(rank, world_size)
    if world_size == 4:
        check_run_check(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ragged_tensor_is_a_tensor(run_ranks, world_size):
    run_ranks(check_tensor, world_size)


def start_ragged(fake_group, rank=1, dtype=torch.float32):
    fake_group(4, rank=rank)
    mesh = init_device_mesh(DEVICE, (4,))
    return ragged_spec(mesh, [RaggedShard((0,), (1, 2, 0, 1))], (8, 4), dtype)


def test_make_ragged_wraps_a_view_of_a_buffer(fake_group):
    spec, buffer = start_ragged(fake_group), torch.zeros(100, device=DEVICE)
    x = make_ragged(buffer[8:24], spec, requires_grad=True)
    assert (x.requires_grad, x.is_leaf, x.shape) == (True, True, (8, 4))
    with torch.no_grad():
        x.add_(1)
    assert buffer.sum() == 16
    assert x._spec is spec


@pytest.mark.parametrize("real", [torch.float32, torch.bfloat16])
def test_set_local_brings_a_parameter_from_meta_and_back(fake_group, real):
    spec = start_ragged(fake_group)
    param = torch.nn.Parameter(make_ragged(torch.empty(16, device="meta"), spec))
    same, weak, calls = param, weakref.ref(param), []
    param.register_hook(lambda grad: calls.append("grad"))
    param.register_post_accumulate_grad_hook(lambda p: calls.append(p is same))
    values = torch.arange(16.0, device=DEVICE).to(real)
    for local in (values, torch.empty(16, device="meta", dtype=real), values.float(), values):
        set_local(param, local)
        assert param is same is weak()
        assert (param.device, param.dtype) == (local.device, local.dtype)
        assert param._spec.tensor_meta.dtype == local.dtype
        assert param.detach().to_local().data_ptr() == local.data_ptr()
        assert isinstance(param, torch.nn.Parameter)
        assert param.requires_grad
        assert param.is_leaf
        assert param.grad is None
    (param * 2).to_local().sum().backward()
    assert calls == ["grad", True]
    assert param.grad.dtype == real
    set_local(param, values + 1)  # same dtype and device: nothing else changes
    assert param.grad is not None
    assert torch.equal(param.detach().to_local(), values + 1)


def test_set_local_changes_the_dtype_while_a_graph_holds_the_parameter(fake_group):
    spec = start_ragged(fake_group)
    param = torch.nn.Parameter(make_ragged(torch.ones(16, device=DEVICE), spec))
    edge = torch.autograd.graph.get_gradient_edge(param)
    set_local(param, torch.ones(16, device=DEVICE, dtype=torch.bfloat16))
    assert param.dtype == torch.bfloat16
    edge = torch.autograd.graph.get_gradient_edge(param)
    with pytest.raises(RuntimeError, match="drop the backward pass"):
        set_local(param, torch.ones(16, device="meta"))
    del edge
    gc.collect()
    set_local(param, torch.ones(16, device="meta"))
    assert param.is_meta
    with pytest.raises(ValueError, match="the length must too"):
        set_local(param, torch.ones(15, device="meta"))


def test_modules_move_ragged_parameters(fake_group):
    spec = start_ragged(fake_group)
    layer = torch.nn.Linear(4, 8, bias=False)
    layer.weight = torch.nn.Parameter(make_ragged(torch.empty(16, device="meta"), spec))
    param = layer.weight
    layer.to_empty(device=DEVICE)
    assert layer.weight is param
    assert param.device.type == DEVICE
    assert param.to_local().device.type == DEVICE
    torch.nn.init.ones_(layer.weight)
    layer.to(torch.float64)
    assert layer.weight is param
    assert (param.dtype, param._spec.tensor_meta.dtype) == (torch.float64, torch.float64)
    assert param.to_local().sum() == 16
    layer.half().requires_grad_(False)
    assert param.dtype == torch.float16


def test_flatten_and_unflatten_are_inverse(fake_group):
    x = make_ragged(torch.ones(16, device=DEVICE), start_ragged(fake_group))
    names, context = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    again = DTensor.__tensor_unflatten__(inner, context, x.shape, x.stride())
    assert type(again) is DTensor
    assert again.placements == x.placements
    assert torch.equal((again + x).to_local(), 2 * x.to_local())
