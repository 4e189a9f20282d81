# SPDX-License-Identifier: Apache-2.0
"""Short texts for values, and the line that a reader can go to."""

import _thread

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from vescale.legacy.debug.describe import call_site, describe, name_of


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, 3, dtype=torch.bfloat16), "bfloat16[2, 3]"),
        (torch.tensor(1), "int64[]"),
        ("sum", "sum"),
        (None, "None"),
        (0.5, "0.5"),
        ([torch.ones(1), (2, "x")], "[float32[1], [2, x]]"),
        ({"a": torch.ones(1)}, "{a: float32[1]}"),
    ],
)
def test_values(value, text):
    assert describe(value) == text


def test_distributed_values(fake_world):
    fake_world(1, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("DP", "TP"))
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Replicate()])
    assert describe(x) == "DTensor float32[4, 3] (S(0), R) on cpu(DP=2, TP=2)"
    assert describe(mesh["TP"]) == "mesh cpu(TP=2)"
    assert describe(init_device_mesh("cpu", (4,))) == "mesh cpu(0=4)"
    assert describe(mesh.get_group("DP")) == "mesh_DP [1, 3]"


@pytest.mark.parametrize(
    ("func", "text"),
    [
        ("all_reduce", "all_reduce"),
        (dist.all_reduce, "all_reduce"),
        (torch.ops.aten.mm.default, "aten.mm.default"),
    ],
)
def test_names_of_operations(func, text):
    assert name_of(func) == text


def test_the_call_site_is_the_first_line_outside_torch():
    sites = []
    torch.nn.Module.apply(torch.nn.Linear(1, 1), lambda _: sites.append(call_site()))
    assert sites[0].startswith(f"{__file__}:")


def test_without_a_frame_of_the_user_the_call_site_says_so():
    # As in backward on an accelerator: a thread with nothing but machinery on its stack.
    code = compile("sites.append(call_site()); done.release()", "engine", "exec")
    sites, done = [], _thread.allocate_lock()
    done.acquire()
    space = {"__name__": "torch.engine", "sites": sites, "call_site": call_site, "done": done}
    _thread.start_new_thread(exec, (code, space))
    assert done.acquire(timeout=10)
    assert sites == ["autograd thread"]
