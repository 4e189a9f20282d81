# SPDX-License-Identifier: Apache-2.0
"""Each private name of torch does what _torch_compat says of it, on the installed version."""

import inspect
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

import vescale.dtensor
from testing.ranks import DEVICE
from vescale.dtensor import DTensor, RaggedShard, _torch_compat, zeros
from vescale.dtensor.spec import make_spec


def test_wrap_fills_the_slots_and_skips_init(fake_group):
    fake_group(2)
    mesh = init_device_mesh(DEVICE, (2,))
    local = torch.ones(3, device=DEVICE, dtype=torch.bfloat16)
    spec = make_spec(mesh, [RaggedShard((0,), (1, 1))], (4, 6), torch.bfloat16)
    x = _torch_compat.wrap(DTensor, local, spec, requires_grad=True)  # 3 elements: no check
    assert type(x) is DTensor
    assert x._local_tensor is local
    assert x._spec is spec
    assert (x.shape, x.stride(), x.dtype, x.device) == ((4, 6), (6, 1), local.dtype, local.device)
    assert x.requires_grad


def test_spec_with_meta_equals_a_constructed_spec(fake_group):
    fake_group(2)
    mesh = init_device_mesh(DEVICE, (2,))
    for placements in ([Shard(0)], [RaggedShard((0,), (1, 1))], [Replicate()]):
        spec = make_spec(mesh, placements, (4, 6), torch.float32)
        hash(spec)
        other = make_spec(mesh, placements, (2, 3), torch.bfloat16)
        found = _torch_compat.spec_with_meta(
            spec, torch.Size((2, 3)), other.tensor_meta.stride, torch.bfloat16
        )
        assert type(found) is _torch_compat.DTensorSpec
        assert found == other
        assert hash(found) == hash(other)
        assert found != spec
        assert found.shard_order == other.shard_order


def test_current_mesh_is_that_of_the_with_block(fake_group):
    fake_group(2)
    mesh = init_device_mesh(DEVICE, (2,))
    with mesh:
        assert _torch_compat.current_mesh() is mesh
    with pytest.raises(RuntimeError, match="mesh"):
        _torch_compat.current_mesh()


def test_implicit_replication_is_seen():
    assert _torch_compat.implicit_replication_enabled() is False
    with implicit_replication():
        assert _torch_compat.implicit_replication_enabled() is True


def test_list_kernels_do_what_their_operators_do():
    aten = torch.ops.aten
    assert _torch_compat.list_kernel(aten._foreach_add_.List) is torch._foreach_add_
    assert _torch_compat.list_kernel(aten._fused_adamw_.default) is torch._fused_adamw_
    assert _torch_compat.list_kernel(aten.add.Tensor) is torch.add
    lists = [torch.ones(2), torch.ones(0)], [torch.full((2,), 3.0), torch.ones(0)]
    for operator, args in (
        (aten._foreach_add.Scalar, (2,)),
        (aten._foreach_add.List, (lists[1],)),
        (aten._foreach_add.ScalarList, ([2, 3],)),
        (aten._foreach_add.Tensor, (torch.tensor(2.0),)),
        (aten._foreach_lerp.Scalar, (lists[1], 0.25)),
        (aten._foreach_addcdiv.ScalarList, (lists[1], lists[1], [0.5, 0.25])),
        (aten._foreach_addcmul.Tensor, (lists[1], lists[1], torch.tensor([0.5, 0.25]))),
    ):
        found = _torch_compat.list_kernel(operator)(lists[0], *args)
        torch.testing.assert_close(found, operator(lists[0], *args), rtol=0, atol=0)


def test_from_local_takes_grad_placements_where_torch_does(fake_group):
    fake_group(2)
    mesh, local = init_device_mesh(DEVICE, (2,)), torch.ones(2, device=DEVICE)
    assert _torch_compat.from_local(local, mesh, [Shard(0)], run_check=False).shape == (4,)
    grad_placements = [Replicate()]
    if "grad_placements" in inspect.signature(_torch_compat.TorchDTensor.from_local).parameters:
        _torch_compat.from_local(local, mesh, [Shard(0)], grad_placements=grad_placements)
    else:
        with pytest.raises(NotImplementedError, match=r"grad_placements=.*needs torch 2\.13"):
            _torch_compat.from_local(local, mesh, [Shard(0)], grad_placements=grad_placements)


def test_foreach_is_chosen_for_our_class_and_set_once():
    for types in (_torch_compat._optimizer_types, _torch_compat._clip_types):
        assert types.count(DTensor) == 1
    _torch_compat.enable_foreach(DTensor)
    assert _torch_compat._clip_types.count(DTensor) == 1


def test_collectives_have_their_new_names_where_torch_renamed_them():
    for name in ("all_gather_single", "reduce_scatter_single"):
        assert getattr(_torch_compat, name) is getattr(dist, name, getattr(_torch_compat, name))


def test_operators_reach_our_dispatch(fake_group):
    fake_group(2)
    mesh = init_device_mesh(DEVICE, (2,))
    x = zeros(4, device_mesh=mesh, placements=[RaggedShard((0,), (1, 1))])
    assert type(x + 1) is DTensor
    with pytest.raises(NotImplementedError, match="redistribute"):
        x.cumsum(0)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert (vescale.dtensor._dispatch_rules is None) == (version >= (2, 12))


def test_replace_tensor_impl_keeps_the_object_and_its_hooks():
    a, b = torch.zeros(2, device="meta", requires_grad=True), torch.ones(3, requires_grad=True)
    weak, calls = weakref.ref(a), []
    a.register_hook(lambda grad: calls.append("hook"))
    a.register_post_accumulate_grad_hook(lambda p: calls.append(p is a))
    _torch_compat.replace_tensor_impl(a, b)
    assert weak() is a
    assert a.device.type == "cpu"
    assert torch.equal(a, torch.ones(3))
    a.sum().backward()
    assert calls == ["hook", True]


def test_importing_prints_nothing_and_needs_no_process_group():
    code = "import warnings; warnings.simplefilter('error'); import vescale.dtensor"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_wrapper_has_metadata_and_no_memory():
    class Wrapper(_torch_compat.AsyncCollectiveTensor):
        @staticmethod
        def __new__(cls, like):
            return _torch_compat.make_wrapper(
                cls, like.shape, strides=like.stride(), dtype=like.dtype, device="cpu"
            )

        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("no operator was called")

    wrapper = Wrapper(torch.empty(3, 2, dtype=torch.bfloat16, device="meta"))
    assert (wrapper.shape, wrapper.dtype) == ((3, 2), torch.bfloat16)
    assert wrapper.device.type == "cpu"
    found = _torch_compat.tree_map_only(Wrapper, lambda w: w.shape, ([wrapper], {"x": 1}))
    assert found == ([wrapper.shape], {"x": 1})
    assert {"wait", "trigger_wait"} <= set(dir(_torch_compat.AsyncCollectiveTensor))


def test_an_operator_in_the_table_goes_to_its_handler(fake_group):
    fake_group(2)
    mesh = init_device_mesh(DEVICE, (2,))
    table, cos = _torch_compat.torch_op_handlers(), torch.ops.aten.cos.default
    assert cos not in table
    x = torch.distributed.tensor.DTensor.from_local(torch.ones(3, device=DEVICE), mesh, [Shard(0)])
    calls = []
    table[cos] = lambda func, args, kwargs: calls.append((func, args, kwargs)) or args[0]
    try:
        cos(x)
    finally:
        del table[cos]
    assert [(func, len(args), kwargs) for func, args, kwargs in calls] == [(cos, 1, {})]
    cos(x)
    assert len(calls) == 1


def test_importing_changes_no_table():
    code = (
        "from vescale.dtensor import random, _torch_compat as c, Shard; import torch;"
        "assert torch.ops.aten.uniform_.default not in c.torch_op_handlers();"
        "assert random.get_mode() == 'off'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_strided_shard_takes_every_nth_piece():
    placement = _torch_compat._StridedShard(1, split_factor=2)
    found = [_torch_compat.strided_shard_indices(placement, 8, 2, rank).tolist() for rank in (0, 1)]
    assert found == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_kernel_without_its_header_is_refused(monkeypatch):
    monkeypatch.setattr(_torch_compat.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(RuntimeError, match="install nvidia-curand or the CUDA toolkit"):
        _torch_compat.compile_cuda_kernel("", "kernel")


def test_a_callback_runs_at_the_end_of_the_backward_that_queued_it():
    """Gradients of plans are reduced there; torch's queue is private, so its loss must be loud."""
    calls, x = [], torch.ones(2, requires_grad=True)

    def note(grad):
        calls.append(_torch_compat.current_backward())
        _torch_compat.on_backward_end(lambda: calls.append(x.grad.tolist()))

    y = x * 2
    y.register_hook(note)
    y.sum().backward()
    assert calls[0] >= 0
    assert calls[1:] == [[2.0, 2.0]]  # after the last gradient, once
    assert _torch_compat.current_backward() == -1
    with pytest.raises(RuntimeError, match="during backward pass"):
        _torch_compat.on_backward_end(lambda: None)
