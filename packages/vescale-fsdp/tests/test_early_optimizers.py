# SPDX-License-Identifier: Apache-2.0
"""Row L4: an optimizer of replaced or of gathered parameters must not step in silence."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import early_optimizers, fully_shard
from vescale.fsdp.optim import Muon


def wrap(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def check_refused(rank, world_size):
    """At the step, on every rank, with the name and the remedy; whatever the optimizer."""
    for make in (
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
        lambda params: Muon([p for p in params if p.ndim == 2], lr=0.1),
    ):
        model = build().to(DEVICE)
        early = make(list(model.parameters()))
        wrap(model)
        loss_of(model, batch(0, rank, DEVICE)).backward()
        for _ in range(2):  # not only once
            with pytest.raises(
                RuntimeError, match=r"fully_shard has replaced.*build the optimizer"
            ):
                early.step()
        make(list(model.parameters())).step()
    # One that took some of its parameters between two wraps, after it has stepped.
    model = build().to(DEVICE)
    fully_shard(model.layers[0])
    optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    model.layers[0](torch.ones(2, 13, device=DEVICE)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": [model.head.weight]})
    optimizer.step()
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"SGD holds 1 parameters .* such as head\.weight"):
        optimizer.step()


def check_gathered(rank, world_size):
    """Built after a forward that kept parameters, after unshard(), or in a copy: refused too."""
    model = wrap(build().to(DEVICE))
    model.set_reshard_after_forward(False)
    sharded = list(model.parameters())
    early = torch.optim.SGD(sharded, lr=0.1)
    with torch.no_grad():
        loss_of(model, batch(0, rank, DEVICE))
    late = torch.optim.AdamW(model.parameters())
    count = sum(new is not old for new, old in zip(model.parameters(), sharded, strict=True))
    assert count > 1
    loss_of(model, batch(0, rank, DEVICE)).backward()
    early.step()
    for _ in range(2):  # also after the parameters were freed
        with pytest.raises(RuntimeError, match=rf"AdamW holds {count} gathered .* such as scale"):
            late.step()
    model.reshard(recurse=True)
    right = torch.optim.AdamW(model.parameters())
    loss_of(model, batch(0, rank, DEVICE)).backward()
    right.step()
    right.add_param_group({"params": []})
    right.step()

    for other in (wrap(build().to(DEVICE)), copy.deepcopy(model)):
        other.reshard(recurse=True)
        other.layers[0].unshard()
        mixed = torch.optim.SGD(other.parameters(), lr=0.1)
        other.layers[0].reshard()
        with pytest.raises(RuntimeError, match=r"SGD holds \d gathered .*reshard\(recurse=True\)"):
            mixed.step()


def check_quiet(rank, world_size):
    """Nobody else hears of it, and a step looks nothing up."""
    plain = build().to(DEVICE)
    twin = copy.deepcopy(plain)
    of_twin = torch.optim.SGD(twin.parameters(), lr=0.1)
    wrapped = wrap(plain)
    ignored = nn.Linear(13, 13).to(DEVICE)
    part = fully_shard(ignored, ignored_params={ignored.bias})
    optimizers = [
        of_twin,
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        torch.optim.SGD([part.bias, *part.parameters()][:1], lr=0.1),
    ]
    for optimizer in optimizers:
        optimizer.step()
    with mock.patch.object(early_optimizers, "getattr", create=True) as look:
        for optimizer in optimizers:
            optimizer.step()
    look.assert_not_called()
    # Once the wrapped model is gone, its old parameters are anybody's.
    old = nn.Linear(4, 4).to(DEVICE)
    optimizer, model = torch.optim.SGD(old.parameters(), lr=0.1), fully_shard(old)
    del model, old
    optimizer.step()
    # What torch.compile makes of a step.
    step = torch.compile(optimizers[0].step, backend="eager")
    step()


def check_all(rank, world_size):
    check_refused(rank, world_size)
    check_gathered(rank, world_size)
    check_quiet(rank, world_size)


def test_optimizers_of_replaced_parameters_are_refused(run_ranks):
    run_ranks(check_all, 2)


def test_nothing_is_registered_by_importing(monkeypatch):
    """Only a wrap registers, once for all."""
    registered = []
    monkeypatch.setattr(early_optimizers, "register_optimizer_step_pre_hook", registered.append)
    monkeypatch.setattr(early_optimizers, "_wraps", 0)
    assert not registered
    for _ in range(3):
        early_optimizers.note_wrap([])
    assert registered == [early_optimizers._before_step]
