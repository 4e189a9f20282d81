# SPDX-License-Identifier: Apache-2.0
import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from testing.models import batch, build, loss_of
from testing.ranks import DEVICE
from vescale.fsdp import fully_shard
from vescale.fsdp.units import param_groups, unit_of


def wrapped():
    model = build(tied=True).to(DEVICE)
    for part in (model.embed, *model.layers, model.head):  # the tie leads from head to embed
        fully_shard(part)
    return fully_shard(model)


def full(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def train(model, rank, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss_of(model, batch(step, rank, DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()


def check_deepcopy(rank, world_size):
    model = wrapped()
    for used_before in (False, True):
        if used_before:
            train(model, rank)
            loss_of(model, batch(7, rank, DEVICE)).backward()
        before = full(model)
        twin = copy.deepcopy(model)
        assert twin.head.weight is twin.embed.weight
        assert type(twin) is type(model)
        for name, param in model.named_parameters():
            other = twin.get_parameter(name)
            assert other is not param
            assert (other.grad is None) == (param.grad is None)
        for one, other in zip(param_groups(model), param_groups(twin), strict=True):
            assert (
                one.weights.shard.data_ptr() != other.weights.shard.data_ptr()
                or not one.plan.shard_numel
            )
        model.zero_grad()
        twin.zero_grad()
        train(twin, rank)
        assert all(torch.equal(before[n], v) for n, v in full(model).items())
        train(model, rank)
        got = full(twin)
        assert all(torch.equal(got[n], v) for n, v in full(model).items())


def check_prefetches(rank, world_size):
    model = wrapped()
    model.layers[0].set_modules_to_forward_prefetch([model.layers[2], model.layers[1]])
    model.layers[2].set_modules_to_backward_prefetch([model.layers[0]])
    clone = copy.deepcopy(model)
    ahead = [ref() for ref in unit_of(clone.layers[0]).forward_prefetch]
    assert ahead == [unit_of(clone.layers[2]), unit_of(clone.layers[1])]
    assert [r() for r in unit_of(clone.layers[2]).backward_prefetch] == [unit_of(clone.layers[0])]
    part = copy.deepcopy(model.layers[2])  # what it gathers ahead is not copied
    assert unit_of(part).backward_prefetch == []
    train(clone, rank)


def check_averaged_model(rank, world_size):
    model = wrapped()
    average = AveragedModel(model)
    first = full(model)
    average.update_parameters(model)
    train(model, rank)
    average.update_parameters(model)
    second = full(model)
    for name, value in full(average.module).items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2)
    assert average(batch(0, rank, DEVICE)).isfinite().all()


class Tied(nn.Module):
    """The borrower of a weight comes before its owner."""

    def __init__(self):
        super().__init__()
        self.borrower, self.owner = nn.Sequential(nn.Linear(5, 5)), nn.Linear(5, 5)
        self.borrower[0].weight = self.owner.weight

    def forward(self, x):
        return self.borrower(self.owner(x))


def check_what_another_unit_keeps_gathered(rank, world_size):
    model = Tied().to(DEVICE)
    fully_shard(model.owner)
    fully_shard(model)
    model.owner.unshard()
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    model.owner.unshard()
    twin = copy.deepcopy(model)
    assert twin.borrower[0].weight is twin.owner.weight
    x = torch.ones(2, 5, device=DEVICE)
    assert torch.equal(twin(x), model(x))
    model.owner.unshard()
    model.double()
    assert model(x.double()).dtype == torch.float64


def check_half_a_tie(rank, world_size):
    model = Tied().to(DEVICE)
    fully_shard(model.owner)
    fully_shard(model.borrower)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"tied.*copy a module that holds both"):
        copy.deepcopy(model.borrower)
    assert copy.deepcopy(model.owner)(torch.ones(2, 5, device=DEVICE)).isfinite().all()


def check_pickle(rank, world_size):
    with pytest.raises(TypeError, match=r"FSDPLanguageModel cannot be pickled.*state_dict"):
        torch.save(wrapped(), io.BytesIO())


def check_all(rank, world_size):
    check_deepcopy(rank, world_size)
    check_prefetches(rank, world_size)
    check_averaged_model(rank, world_size)
    check_what_another_unit_keeps_gathered(rank, world_size)
    check_half_a_tie(rank, world_size)
    check_pickle(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_copies_are_independent_and_pickles_are_refused(run_ranks, world_size):
    run_ranks(check_all, world_size)
