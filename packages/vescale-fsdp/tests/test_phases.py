# SPDX-License-Identifier: Apache-2.0
"""Where all ranks were, in the error of a collective that fails."""

import functools
import logging
import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import clip_grad_norm_, fully_shard, iter_full_parameters, phase_board
from vescale.fsdp.phase_board import NO_WORD, Row, board, describe, ranges_of
from vescale.fsdp.phases import HERE, waiting
from vescale.fsdp.state_dict import StateDictOptions, get_model_state_dict


def wrapped(timeout=3):
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    mesh = DeviceMesh.from_group(group, DEVICE)
    model = build().to(DEVICE)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_of(model, batch(0, dist.get_rank(), DEVICE)).backward()
    dist.barrier()  # in the time of the default group
    return model


def sleeps(model, place, seconds=7):
    """Let this rank sleep at ``place`` of the next step, and end without a word."""

    def act(*_):
        time.sleep(seconds)
        os._exit(0)

    if place == "forward":
        model.layers[1].up.register_forward_pre_hook(act)
    elif place == "backward":
        model.layers[1].up.register_full_backward_pre_hook(act)
    else:
        act()


HUNG = {
    "forward": r"rank 2: forward of unit 'layers\.1', in or after forward 2, since \d\d:\d\d:\d\d",
    "backward": r"rank 2: backward of unit 'layers\.1', in or after forward 2",
    "between": r"rank 2: code after a backward, in or after forward 1",
}


def check_hang(rank, world_size, place):
    """The others name the unit and the phase of the one that hangs, and of each other."""
    model = wrapped()
    if rank == world_size - 1:
        sleeps(model, place)
    with pytest.raises(RuntimeError) as caught:
        loss_of(model, batch(1, rank, DEVICE)).backward()
    text = str(caught.value)
    assert re.search(HUNG[place], text), text
    unit = r"(gather of the parameters|reduction of the gradients) of unit '.+'"
    assert re.search(rf"ranks 0-1: {unit}, in or after forward 2", text), text


@pytest.mark.parametrize("place", HUNG)
def test_a_rank_that_hangs_is_told_with_its_unit_and_phase(run_ranks, place):
    if DEVICE == "cuda":
        pytest.skip("NCCL reports a lost peer through its watchdog, after the timeout")
    run_ranks(check_hang, 3, place, exact=True)


def check_death(rank, world_size):
    """A process that ended is one that has no word."""
    model = wrapped(timeout=30)
    if rank == 1:
        sleeps(model, "forward", seconds=0)
    with pytest.raises(RuntimeError) as caught:
        loss_of(model, batch(1, rank, DEVICE)).backward()
    assert f"rank 1: {NO_WORD}" in str(caught.value)
    assert re.search(r"ranks? .*: gather of the parameters of unit", str(caught.value))


def test_a_rank_that_died_has_no_word(run_ranks):
    if DEVICE == "cuda":
        pytest.skip("NCCL reports a lost peer through its watchdog, after the timeout")
    run_ranks(check_death, 3, exact=True)


ALONE = {
    "sum of gradient norms over ranks": lambda model: clip_grad_norm_(model, 1.0),
    "gather of a full state": lambda model: get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True)
    ),
    "gather of whole parameters": lambda model: [*iter_full_parameters(model)],
}


def check_other_path(rank, world_size, phase):
    """One rank is at something else, another at the next forward."""
    model = wrapped()
    other = functools.partial(ALONE[phase], model)
    forward = functools.partial(loss_of, model, batch(1, rank, DEVICE))
    with pytest.raises(RuntimeError) as caught:
        (other if rank == 0 else forward)()
    text = str(caught.value)
    assert re.search(f"rank 0: {phase}, in or after forward 1", text), text
    assert re.search("rank 1: gather of the parameters of unit '.+', in or after forward 2", text)


@pytest.mark.parametrize("phase", ALONE)
def test_ranks_on_different_paths_are_told_apart(run_ranks, phase):
    if DEVICE == "cuda":
        pytest.skip("NCCL reports a lost peer through its watchdog, after the timeout")
    run_ranks(check_other_path, 2, phase, exact=True)


def fail():
    with waiting("large gather"):
        raise RuntimeError("lost")


def check_board(rank, world_size):
    """Rows come and go, and a rank that goes on after a halt takes its row back."""
    group = dist.new_group(timeout=timedelta(seconds=2))  # looked at twice a second
    with waiting("first collective", group=group):
        pass
    dist.barrier()
    shared = board()
    assert board() is shared
    assert set(shared.read().values()) == {None}
    dist.barrier()
    HERE.at("a long evaluation")
    end = time.monotonic() + 10
    while None in shared.read().values() and time.monotonic() < end:
        time.sleep(0.1)
    assert {row.what for row in shared.read().values()} == {"a long evaluation"}
    dist.barrier()
    HERE.at("something else")
    while set(shared.read().values()) == {"a long evaluation"} and time.monotonic() < end:
        time.sleep(0.1)
    with pytest.raises(torch.OutOfMemoryError, match=r"^none left$"), waiting("large gather"):
        raise torch.OutOfMemoryError("none left")
    with pytest.raises(RuntimeError, match=r"the large gather failed on rank .*: lost") as caught:
        fail()
    assert re.search(r"ranks? [-, 0-9]+: large gather", str(caught.value))


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_board_shows_ranks_that_halt(run_ranks, world_size):
    run_ranks(check_board, world_size)


def check_few_readers(rank, world_size):
    """Of many ranks only some ask the store; the others say so."""
    phase_board.MOST_READERS = 1
    dist.barrier()
    with pytest.raises(RuntimeError) as caught:
        fail()
    told = [None] * world_size
    dist.all_gather_object(told, str(caught.value))
    assert sum("ranks 0-1: large gather" in text for text in told) == 1
    assert sum("is in the errors of 1 other ranks" in text for text in told) == 1


def test_few_ranks_ask_the_store(run_ranks):
    run_ranks(check_few_readers, 2, exact=True)


def check_warning(rank, world_size):
    """Before a backend's watchdog ends the process, the log says where the ranks are."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("vescale.fsdp").addHandler(handler)
    group = dist.new_group(timeout=timedelta(seconds=3))
    with waiting("gather", "layers.1", group):
        if rank == 0:
            dist.barrier()  # of the default group, where there is time
    if rank == 1:
        time.sleep(5)
        dist.barrier()
    (record,) = records
    text = record.getMessage()
    assert f"rank {rank} did not go on for 2 s, and a collective fails after 3 s." in text
    assert "rank 0: gather of unit 'layers.1'" in text
    assert "rank 1: before the first" in text


def test_a_halt_is_logged_before_the_timeout(run_ranks):
    run_ranks(check_warning, 2, exact=True)


def check_new_world(rank, world_size, store):
    """A store that was kept alive would be met again."""
    with waiting("first collective"):
        dist.barrier()
    first = board()
    dist.barrier()
    dist.destroy_process_group()
    assert first._world() is None
    assert board() is None
    store = dist.FileStore(store, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with waiting("first collective"):
        dist.barrier()
    assert board() is not first
    assert first._ended.is_set()


def test_no_process_group_is_kept_alive(run_ranks, tmp_path):
    run_ranks(check_new_world, 2, str(tmp_path / "store"), exact=True)


def test_what_is_printed():
    rows = {rank: Row("gather of unit 'a'", True, 3, 60.0 + rank) for rank in range(6)}
    rows[4] = Row("forward of unit 'b'", False, 3, 3600.0)
    rows[5] = None
    assert describe(rows).splitlines() == [
        "",
        "Where the ranks were:",
        "  rank 4: forward of unit 'b', in or after forward 3, since 01:00:00 UTC",
        f"  rank 5: {NO_WORD}",
        "  ranks 0-3: gather of unit 'a', in or after forward 3, since 00:01:00 UTC",
    ]
    assert ranges_of([1, 2, 3, 5, 7, 8]) == "ranks 1-3, 5, 7-8"


def test_one_process_has_no_board():
    assert not dist.is_initialized()
    assert board() is None
    with pytest.raises(RuntimeError, match=r"lost$"):
        fail()
