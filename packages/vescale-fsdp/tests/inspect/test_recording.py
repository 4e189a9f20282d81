# SPDX-License-Identifier: Apache-2.0
"""A recorded step shows the units in the order of the schedule, and costs nothing otherwise."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import fully_shard, inspect
from vescale.fsdp.inspect.trace import HELD, HOST, Recorder
from vescale.fsdp.phases import HERE

UNITS = ["layers.0", "layers.1", "layers.2"]


def wrap(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def read(path):
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def check_nesting(events):
    """Spans of one track lie in each other or apart, as the format asks."""
    for track in {(event["pid"], event["tid"]) for event in events}:
        spans = sorted(
            ((e["ts"], e["ts"] + e["dur"]) for e in events if (e["pid"], e["tid"]) == track),
            key=lambda span: (span[0], -span[1]),
        )
        ends = []
        for begin, end in spans:
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1], track
            ends.append(end)


def named(events, start, kind=None):
    found = [e for e in events if e["name"].startswith(start) and kind in (None, e["cat"])]
    return [e["name"].removeprefix(start).strip() for e in sorted(found, key=lambda e: e["ts"])]


def step(model, optimizer, rank):
    loss_of(model, batch(0, rank, DEVICE)).backward()
    optimizer.step()
    optimizer.zero_grad()


def check_step(rank, world_size, path, shape):
    names = ("replicate", "shard")[-len(shape) :]
    model = wrap(build().to(DEVICE), mesh=init_device_mesh(DEVICE, shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, rank)
    assert HERE.listener is None
    with inspect.record_step(path / "trace") as file:
        step(model, optimizer, rank)
        with (
            pytest.raises(RuntimeError, match="a step is being recorded already"),
            inspect.record_step(path / "other"),
        ):
            pass
    assert HERE.listener is None
    assert file == path / "trace" / f"rank{rank}.json"
    step(model, optimizer, rank)  # leaves no trace
    events = read(file)
    check_nesting(events)
    assert {event["pid"] for event in events} == {rank}
    assert named(events, "forward") == ["(root)", *UNITS]
    assert named(events, "backward") == ["(root)", *reversed(UNITS)]
    assert named(events, "AdamW.step") == [""]
    for kind in ("gather", "full parameters"):
        found = named(events, "", kind)
        assert found[:4] == ["(root)", *UNITS], kind
        assert sorted(found[4:]) == UNITS, "again for backward, but for the root"
    assert sorted(named(events, "", "reduce")) == ["(root)", *UNITS]
    waits = named(events, "gather of the parameters", "wait")
    assert set(waits) == {"(root)", *UNITS}
    # What is computed lies where the full parameters do.
    (root,) = (e for e in events if e["name"] == "(root)" and e["cat"] == "full parameters")
    (backward,) = (e for e in events if e["name"] == "backward layers.2")
    held = [e for e in events if e["name"] == "layers.2" and e["cat"] == "full parameters"]
    assert any(
        e["ts"] <= backward["ts"] and e["tid"] // 100 * 100 == HELD and e["args"]["bytes"] > 0
        for e in held
    )
    (forward,) = (e for e in events if e["name"] == "forward (root)")
    assert root["ts"] <= forward["ts"]
    assert forward["tid"] == HOST
    dist.barrier()
    if rank == 0:
        inspect.merge_traces(path / "trace", path / "all.json")
        merged = read(path / "all.json")
        assert {event["pid"] for event in merged} == set(range(world_size))
        check_nesting(merged)


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_a_step_shows_units_in_the_order_of_the_schedule(run_ranks, shape, tmp_path):
    world_size = shape[0] if len(shape) == 1 else 4
    run_ranks(check_step, world_size, tmp_path, shape)


def check_unusual_steps(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    blocks = [Checkpointed(fully_shard(nn.Linear(8, 8), mesh=mesh)) for _ in range(2)]
    model = fully_shard(nn.Sequential(*blocks).to(DEVICE), mesh=mesh)
    x = torch.randn(4, 8, device=DEVICE)
    with inspect.record_step(path) as file:
        for _ in range(2):
            model(x).sum().backward()
    events = read(file)
    check_nesting(events)
    forwards = named(events, "forward")
    assert forwards.count("0.inner") == forwards.count("1.inner") == 4, "and again in backward"

    def fails(*_):
        raise ValueError("no")

    handle = model[1].register_forward_pre_hook(fails)
    with pytest.raises(ValueError, match="no"), inspect.record_step(path) as file:
        model(x)
    handle.remove()
    assert HERE.listener is None
    events = read(file)  # all that was open ends
    check_nesting(events)
    assert named(events, "forward") == ["(root)", "0.inner"]
    loss = model(x).sum()
    with inspect.record_step(path) as file:  # begins amid a step
        loss.backward()
    check_nesting(read(file))
    assert named(read(file), "backward")


def test_recomputation_errors_and_half_steps_leave_whole_traces(run_ranks, tmp_path):
    run_ranks(check_unusual_steps, 2, tmp_path)


def test_phases_that_end_what_did_not_begin_are_passed_over():
    recorder = Recorder(0, "host")
    recorder.at("code after the forward", "layers.0", False)
    recorder.back()
    recorder.pop("Adam.step")
    recorder.at("forward", "", False)
    recorder.back()
    recorder.at("gather of the parameters", "a", True)
    events = [event for event in recorder.end() if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["gather of the parameters a", "forward (root)"]


def test_mistakes_are_told(tmp_path):
    with (
        pytest.raises(TypeError, match="folder is a int, expected the name of a folder"),
        inspect.record_step(3),
    ):
        pass
    with pytest.raises(ValueError, match=r"has no rank0\.json or other trace; pass the folder"):
        inspect.merge_traces(tmp_path, tmp_path / "all.json")
