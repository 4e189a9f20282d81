# SPDX-License-Identifier: Apache-2.0
"""Who prints, where to, and when: the switch of ``DebugLogger``."""

import contextlib
import io
import logging
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from testing.ranks import DEVICE
from vescale.legacy.debug import DebugLogger
from vescale.legacy.devicemesh_api import VESCALE_DEVICE_MESH


class Lines:
    """The least that may be a logger."""

    def __init__(self):
        self.lines = []

    def debug(self, text):
        self.lines.append(text)


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    DebugLogger.set_vescale_debug_mode(False)


def printing_ranks(fake_world, capsys, world_size=4):
    found = []
    for rank in range(world_size):
        fake_world(rank, world_size)
        DebugLogger.log("here")
        if capsys.readouterr().out:
            found.append(rank)
    return found


def test_off_at_import_and_silent(capsys):
    assert DebugLogger.IS_DEBUG_MODE is False
    DebugLogger.log("text")
    DebugLogger.log_communication(dist.all_reduce, torch.ones(2))
    DebugLogger.log_op("op", (), {}, None)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("rank_to_print", "expected"),
    [(None, [0]), (2, [2]), ((1, 3), [1, 3]), ([0, 2], [0, 2]), ((-1,), [0, 1, 2, 3]), ((), [])],
)
def test_only_chosen_ranks_print(fake_world, capsys, rank_to_print, expected):
    DebugLogger.set_vescale_debug_mode(True, rank_to_print=rank_to_print)
    assert DebugLogger.IS_DEBUG_MODE is True
    assert printing_ranks(fake_world, capsys) == expected


@pytest.mark.parametrize("wrong", ["0", 1.0, {0}, ("0",), [None], True])
def test_other_kinds_of_ranks_are_refused(wrong):
    with pytest.raises(TypeError, match="rank_to_print"):
        DebugLogger.set_vescale_debug_mode(True, rank_to_print=wrong)
    assert DebugLogger.IS_DEBUG_MODE is False


@pytest.mark.parametrize("wrong", [-2, (0, -1)])
def test_negative_ranks_are_refused(wrong):
    with pytest.raises(ValueError, match=r"\(-1,\)"):
        DebugLogger.set_vescale_debug_mode(True, rank_to_print=wrong)


def test_a_logger_takes_the_place_of_stdout(capsys):
    logger = Lines()
    DebugLogger.set_vescale_debug_mode(logger=logger)
    DebugLogger.log("text", 3)
    assert logger.lines == ["[rank 0] | text | 3"]
    assert capsys.readouterr().out == ""


def test_a_python_logger_works(caplog):
    caplog.set_level(logging.DEBUG)
    DebugLogger.set_vescale_debug_mode(logger=logging.getLogger("vescale"))
    DebugLogger.log("text")
    assert caplog.messages == ["[rank 0] | text"]


def test_a_logger_must_debug():
    with pytest.raises(TypeError, match="debug"):
        DebugLogger.set_vescale_debug_mode(logger=sys.stdout)


def test_turning_off_forgets_ranks_and_logger(fake_world, capsys):
    DebugLogger.set_vescale_debug_mode(rank_to_print=3, logger=Lines())
    DebugLogger.set_vescale_debug_mode(False)
    assert printing_ranks(fake_world, capsys) == []
    DebugLogger.set_vescale_debug_mode(True)
    assert printing_ranks(fake_world, capsys) == [0]


def test_turning_on_again_changes_the_ranks(fake_world, capsys):
    DebugLogger.set_vescale_debug_mode(rank_to_print=3)
    DebugLogger.set_vescale_debug_mode(rank_to_print=1)
    assert printing_ranks(fake_world, capsys) == [1]


def test_turning_off_twice_is_fine():
    DebugLogger.set_vescale_debug_mode(False)
    DebugLogger.set_vescale_debug_mode(False)


def test_the_environment_decides_when_asked(monkeypatch, fake_world, capsys):
    monkeypatch.setenv("VESCALE_DEBUG_MODE", "1")
    assert DebugLogger.IS_DEBUG_MODE is False
    DebugLogger.update_vescale_debug_mode_from_env()
    assert printing_ranks(fake_world, capsys) == [0, 1, 2, 3]
    monkeypatch.setenv("VESCALE_DEBUG_MODE", "0")
    DebugLogger.update_vescale_debug_mode_from_env()
    assert DebugLogger.IS_DEBUG_MODE is False


def test_an_unset_environment_changes_nothing(monkeypatch):
    monkeypatch.delenv("VESCALE_DEBUG_MODE", raising=False)
    DebugLogger.set_vescale_debug_mode(True)
    DebugLogger.update_vescale_debug_mode_from_env()
    assert DebugLogger.IS_DEBUG_MODE is True


def test_another_word_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("VESCALE_DEBUG_MODE", "yes")
    with pytest.raises(ValueError, match="expected '0' or '1'"):
        DebugLogger.update_vescale_debug_mode_from_env()


def test_a_communication_can_be_logged_by_hand(capsys):
    DebugLogger.set_vescale_debug_mode(True)
    DebugLogger.log_communication(dist.all_reduce, torch.ones(2, 3), "sum")
    line = capsys.readouterr().out.strip()
    assert line.endswith("all_reduce(float32[2, 3], sum)")
    assert __file__ in line


def test_an_operation_can_be_logged_by_hand(capsys):
    DebugLogger.set_vescale_debug_mode(True)
    DebugLogger.log_op("scale", (torch.ones(2), 3), {"alpha": 2}, torch.ones(2, dtype=torch.int8))
    line = capsys.readouterr().out.strip()
    assert line.endswith("scale(float32[2], 3, alpha=2) -> int8[2]")


def step_of_tiny_mlp():
    """Run forward and backward with debug mode on; return loss and gradients."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    parallelize_module(
        model, VESCALE_DEVICE_MESH["TP"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    loss = model(torch.ones(4, 8, device=DEVICE)).square().mean()
    loss.backward()
    grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return [loss.detach(), *grads]


def check_chosen_ranks_print_a_step(rank, world_size):
    tp = 1 if world_size % 2 else 2
    VESCALE_DEVICE_MESH.init_device_mesh(DEVICE, (world_size // tp, tp))
    expected = step_of_tiny_mlp()

    chosen = (1, world_size - 1)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        DebugLogger.set_vescale_debug_mode(True, rank_to_print=chosen)
        found = step_of_tiny_mlp()
        DebugLogger.set_vescale_debug_mode(False)
        step_of_tiny_mlp()  # silent again
    text = out.getvalue()

    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if rank not in chosen:
        assert text == ""
        return
    assert len(text) > 100
    lines = text.splitlines()
    assert all(line.startswith(f"[rank {rank}] | ") for line in lines)
    forward = next(line for line in lines if "aten.addmm" in line)
    for part in (
        "Sequential.0",
        "test_debug_log.py:",
        "(S(0))",
        "-> DTensor float32[4, 16] (S(1))",
    ):
        assert part in forward
    assert any("aten.mm" in line and "Sequential.0" in line for line in lines), "no backward"
    if tp == 2:
        reduce = next(line for line in lines if "all_reduce" in line)
        assert "float32[4, 8], sum, " in reduce
        assert str([rank // 2 * 2, rank // 2 * 2 + 1]) in reduce


def test_chosen_ranks_print_a_step_and_change_nothing(run_ranks):
    run_ranks(check_chosen_ranks_print_a_step, 4)
