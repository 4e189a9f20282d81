# SPDX-License-Identifier: Apache-2.0
"""Each private name of torch that the package uses still means what it meant."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from testing.collectives import CountCollectives
from testing.ranks import COLLECTIVE_TIMEOUT, DEVICE
from vescale.fsdp import _torch_compat as compat


def test_set_version_hides_a_write_from_autograd():
    x = torch.zeros(4)
    view = torch.nn.Parameter(x.narrow(0, 1, 2))
    x.add_(1)
    assert view._version == 1
    compat.set_version(x, 0)
    assert view._version == 0


def test_storage_references_count_every_view():
    x = torch.zeros(4)
    before = compat.storage_references(x)
    views = [x[:2], torch.nn.Parameter(x.view(2, 2))]
    assert compat.storage_references(x) == before + 2
    del views
    assert compat.storage_references(x) == before


def test_foreach_functions_write_in_place_and_cast():
    views, parts = [torch.zeros(3), torch.zeros(2, 2)], [torch.ones(3), torch.ones(2, 2)]
    parts[1] = parts[1].to(torch.bfloat16).t()
    compat.foreach_copy_(views, parts)
    compat.foreach_add_(views, parts)
    assert views[0].tolist() == [2, 2, 2]
    assert views[1].tolist() == [[2, 2], [2, 2]]
    compat.foreach_zero_(views)
    assert views[0].tolist() == [0, 0, 0]


def test_profiler_runs_while_one_does():
    assert not compat.profiler_runs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert compat.profiler_runs()
    assert not compat.profiler_runs()


def test_is_newest_tells_an_output_from_an_input():
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (seen.append(compat.is_newest(t.grad_fn)), t)[1], lambda t: t
    ):
        y = (torch.ones(2, requires_grad=True) * 2).exp()  # saves its output
        y.sin()  # saves its input
    assert seen == [True, False]


def test_current_backward_is_told_inside_of_hooks_only():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(compat.current_backward()))
    (x * 2).sum().backward()
    assert seen[0] >= 0
    assert compat.current_backward() == -1


def test_will_execute_tells_what_a_backward_will_reach():
    seen = []
    x = torch.ones(1, requires_grad=True)
    used, unused = x.view_as(x), x.view_as(x)
    nodes = [used.grad_fn, unused.grad_fn]
    used.register_hook(lambda _: seen.extend(map(compat.will_execute, nodes)))
    (used * 2).sum().backward()
    assert seen == [True, False]


def test_on_backward_end_runs_after_the_last_gradient():
    order = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: compat.on_backward_end(lambda: order.append("end")))
    x.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    y.sum().backward()
    assert order == ["gradient", "end"]


def test_top_saved_tensor_hooks_are_the_innermost_pair():
    assert compat.top_saved_tensor_hooks() is None

    def pack(t):
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert compat.top_saved_tensor_hooks() == (pack, pack)


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_the_outermost_reentrant_checkpoint_is_found_while_its_forward_runs():
    seen = []

    def inner(x):
        seen.append(compat.reentrant_checkpoint())
        return x * 2

    def outer(x):
        return checkpoint(inner, checkpoint(inner, x, use_reentrant=True), use_reentrant=True)

    x = torch.ones(1, requires_grad=True)
    assert compat.reentrant_checkpoint() is None
    y = checkpoint(outer, x, use_reentrant=True)
    assert seen[0] is not None
    assert seen[0] is seen[1]
    first = seen[0]
    y.sum().backward()
    assert first not in seen[2:]
    inner(x)
    checkpoint(inner, x, use_reentrant=False)
    assert seen[-2:] == [None, None]


def test_hooks_of_a_leaf_are_listed():
    x = torch.ones(1, requires_grad=True)
    assert compat.gradient_hooks(x) == []
    assert compat.post_accumulate_hooks(x) == []
    x.register_hook(print)
    x.register_post_accumulate_grad_hook(print)
    assert compat.gradient_hooks(x) == [print]
    assert compat.post_accumulate_hooks(x) == [print]


def check_backend(rank, world_size):
    group, device = dist.group.WORLD, torch.device(DEVICE)
    assert compat.averages(group, device) == (DEVICE == "cuda")
    assert not compat.is_fake(group, device)
    assert compat.is_gloo(group, device) == (DEVICE == "cpu")
    assert compat.timeout_of(group) == COLLECTIVE_TIMEOUT
    assert compat.timeout_of(dist.new_group(timeout=timedelta(seconds=7))) == timedelta(seconds=7)
    compat.store_of(group).set(f"from {rank}", "here")
    dist.barrier()
    assert compat.store_of(group).get(f"from {(rank + 1) % world_size}") == b"here"


def check_coalescing(rank, world_size):
    """Gathers inside are one launch, and so are reductions; ``wait`` is for all of them."""
    options = {"dtype": torch.bfloat16, "device": DEVICE}
    full = [torch.zeros(world_size * n, **options) for n in (3, 8)]
    shards = [torch.full((n,), rank + 1.0, **options) for n in (3, 8)]
    with CountCollectives() as count:
        with compat.coalescing(dist.group.WORLD) as work:
            for output, source in zip(full, shards, strict=True):
                compat.all_gather_flat(output, source, async_op=True)
        work.wait()
        assert [f.view(world_size, -1)[:, 0].tolist() for f in full] == [[1.0, 2.0, 3.0]] * 2
        with compat.coalescing(dist.group.WORLD) as work:
            for output, source in zip(shards, full, strict=True):
                compat.reduce_scatter_flat(output, source, async_op=True)
        work.wait()
    assert [s.tolist() for s in shards] == [[world_size * (rank + 1.0)] * n for n in (3, 8)]
    assert count.total == 2


def test_coalesced_collectives_are_one_launch(run_ranks):
    run_ranks(check_coalescing, 3)


def test_the_backend_of_a_group_is_known(run_ranks):
    run_ranks(check_backend, 1)


def test_a_fake_group_is_known(fake_group):
    group = fake_group(8)
    assert compat.is_fake(group, torch.device("cpu"))
    assert not compat.averages(group, torch.device("cpu"))
    assert not compat.is_gloo(group, torch.device("cpu"))


def test_foreach_norm_takes_a_dtype_and_foreach_mul_a_tensor():
    parts = [torch.full((4,), 3.0, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    norms = compat.foreach_norm(parts, 2.0, torch.float32)
    assert [(norm.dtype, norm.item()) for norm in norms] == [(torch.float32, 6.0)] * 2
    compat.foreach_mul_(parts, torch.tensor(0.5, device=DEVICE))
    assert all(part.dtype == torch.bfloat16 and part[0] == 1.5 for part in parts)


def test_concatenated_meshes_have_the_groups_of_both(fake_group):
    fake_group(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = compat.concatenate_meshes(mesh["dp"], mesh["tp"])
    assert whole == mesh
    assert whole.get_coordinate() == (0, 0)
    assert whole.get_group(1) is mesh["tp"].get_group()
    with pytest.raises(RuntimeError, match="overlapping"):
        compat.concatenate_meshes(mesh["dp"], mesh["dp"])


def test_a_flattened_mesh_has_one_axis_and_is_made_once(fake_group):
    fake_group(8, 5)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    flat = compat.flatten_mesh(mesh["a", "b"])
    assert (flat.mesh_dim_names, flat.mesh.tolist()) == (("a_b",), [1, 3, 5, 7])
    assert compat.flatten_mesh(mesh["a", "b"]).get_group() is flat.get_group()
    assert compat.concatenate_meshes(flat, mesh["c"]).mesh.shape == (4, 2)


def test_the_compiler_leaves_marked_functions_alone_and_compiles_what_they_call():
    seen = []

    def hidden(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def around(function, x):
        seen.append(torch.compiler.is_compiling())
        return function(compat.untraced(hidden)(x))

    def inner(x):
        return x * 2

    compat.leave_untraced(around)
    counters.clear()
    compiled = torch.compile(lambda x: around(inner, x) + 1, backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [5, 5]
    assert seen == [False] * 4
    assert counters["stats"]["unique_graphs"] >= 2, "inner, and what follows around"
    assert compat.call_untraced(inner, 2) == 4


def check_device_for(rank, world_size):
    values = torch.ones(2, device=compat.device_for(dist.group.WORLD))
    dist.all_reduce(values)
    assert values.tolist() == [world_size] * 2


def test_the_device_of_a_group_is_one_that_its_collectives_take(run_ranks):
    run_ranks(check_device_for, 2)
