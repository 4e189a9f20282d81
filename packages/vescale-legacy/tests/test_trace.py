# SPDX-License-Identifier: Apache-2.0
"""What is seen of a job: operations, collectives, modules, and what must stay untouched."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from vescale.legacy._torch_compat import TorchDispatchMode, top_dispatch_mode
from vescale.legacy.debug.trace import OpTrace


def short_name(op):
    return op.name().partition("::")[2].partition(".")[0]


class Log:
    """Collect what a trace reports, and the module it was in."""

    def __init__(self):
        self.on = True
        self.events = []
        self.trace = OpTrace(lambda: self.on, self.op, self.collective)

    def op(self, op, args, kwargs, out):
        self.events.append((short_name(op), self.trace.module_path, out))

    def collective(self, op, *args):
        self.events.append((short_name(op), self.trace.module_path, args))

    @property
    def names(self):
        return [name for name, _, _ in self.events]


@pytest.fixture
def log():
    log = Log()
    yield log
    if top_dispatch_mode() is log.trace:
        log.trace.close()
    assert top_dispatch_mode() is None


@pytest.fixture
def mesh(fake_world):
    fake_world(0, 4)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("DP", "TP"))


def test_plain_operations_are_not_reported(log):
    log.trace.open()
    torch.ones(3).add(1).sum()
    assert log.events == []


def test_an_operation_is_reported_once_with_its_result(log, mesh):
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Replicate()])
    log.trace.open()
    y = x + 1
    [(name, _, out)] = log.events
    assert name == "add"
    assert out is y


def test_collectives_inside_an_operation_come_before_it(log, mesh):
    x = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)])
    log.trace.open()
    x @ x
    assert log.names[-1] == "mm"
    assert log.names[:-1]
    assert set(log.names[:-1]) == {"all_gather_into_tensor"}


def test_redistribution_reports_groups_not_names(log, mesh):
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate(), Partial()])
    log.trace.open()
    x.redistribute(mesh, [Replicate(), Replicate()]).full_tensor()
    [(name, _, args)] = log.events
    assert name == "all_reduce"
    assert dist.get_process_group_ranks(args[-1]) == [0, 1]


def test_collectives_called_directly_are_reported(log, mesh):
    log.trace.open()
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=mesh.get_group("DP"))
    dist.broadcast(tensor, src=0)
    [(first, _, args), (second, _, _)] = log.events
    assert (first, second) == ("allreduce_", "broadcast_")
    assert dist.get_process_group_ranks(args[1]) == [0, 2]


def test_modules_are_named_forward_and_backward(log, mesh):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    for name, parameter in list(model[0].named_parameters()):
        parameter = torch.nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()] * 2))
        model[0].register_parameter(name, parameter)
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
    log.trace.open()
    out = model(x)
    forward = {name: path for name, path, _ in log.events}
    assert forward["addmm"] == "Sequential.0"
    assert forward["tanh"] == "Sequential.1"
    log.events.clear()
    out.to_local().sum().backward()
    backward = {name: path for name, path, _ in log.events}
    assert backward["tanh_backward"] == "Sequential.1"
    assert backward["mm"] == "Sequential.0"
    log.events.clear()
    x + x
    assert log.events[0][1] == ""


def test_a_failing_operation_is_reported_and_its_error_passes(log, mesh):
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Replicate()])
    log.trace.open()
    with pytest.raises(RuntimeError, match="mixed"):
        x @ torch.ones(3, 3)
    [(name, _, out)] = log.events
    assert name == "mm"
    assert isinstance(out, RuntimeError)
    x + 1
    assert log.names == ["mm", "add"]


def test_an_unwanted_trace_reports_nothing_and_changes_nothing(log, mesh):
    x = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)])
    log.on = False
    log.trace.open()
    out = x @ x
    assert log.events == []
    assert out.placements == (x @ x).placements
    log.on = True
    x + 1
    assert log.names == ["add"]


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_random_operations_and_dropout_run(log, mesh):
    x = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0), Replicate()])
    log.trace.open()
    out = torch.nn.functional.dropout(x, 0.5)
    assert isinstance(out, DTensor)
    assert log.names


def test_checkpointed_backward_runs(log, mesh):
    x = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0), Replicate()]).requires_grad_()
    log.trace.open()
    out = torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)
    out.to_local().sum().backward()
    assert log.names.count("tanh") == 2


def test_closing_leaves_no_mode_and_no_hook(log):
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    log.trace.open()
    assert len(hooks) == before + 1
    log.trace.close()
    assert top_dispatch_mode() is None
    assert len(hooks) == before


def test_closing_under_another_mode_is_refused_and_can_be_done_later(log):
    class Through(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    log.trace.open()
    with Through(), pytest.raises(RuntimeError, match="on top"):
        log.trace.close()
    assert top_dispatch_mode() is log.trace
    log.trace.close()


def test_closing_in_another_thread_is_refused(log):
    log.trace.open()
    errors = []

    def close():
        try:
            log.trace.close()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "thread" in str(errors[0])


def test_an_operation_works_through_a_mode_opened_above(log, mesh):
    class Through(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Replicate()])
    log.trace.open()
    with Through():
        x + 1
    assert log.names == ["add"]
