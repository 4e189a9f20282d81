# SPDX-License-Identifier: Apache-2.0
"""``fully_shard([a, b])``: several modules in one unit, held against FSDP2."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from testing.models import VOCAB, Block, batch
from testing.ranks import DEVICE
from testing.side_by_side import compare
from vescale.dtensor import DTensor
from vescale.fsdp import Elements, FSDPModule, MixedPrecisionPolicy, fully_shard, inspect
from vescale.fsdp.param_group import State
from vescale.fsdp.units import param_groups, unit_of

# FSDP2's lists cannot run in parts in an older torch; ours can in all of them.
RUNS_PARTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class Chunky(nn.Module):
    """``forward`` returns hidden states, or logits: chunks of a loss call the head themselves."""

    def __init__(self, width=13):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens, logits=False):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x) if logits else x


def wrapped(shard, seed=0, **options):
    torch.manual_seed(seed)
    model = Chunky().to(DEVICE)
    for layer in model.layers:
        shard(layer, **options)
    pair = [model.norm, model.head]
    assert shard(pair, **options) is pair
    return shard(model)


def tokens_of(step=0):
    return batch(step, dist.get_rank(), DEVICE)


def loss_of(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def whole(side, reshard):
    model = wrapped(side.api.fully_shard, reshard_after_forward=reshard)
    for step in range(3):
        with side.counted():
            loss = loss_of(model(tokens_of(step), logits=True), tokens_of(step))
            side.look(model.norm, model.head, model.layers[0])
            side.numbers.append(loss.item())
            loss.backward()
        side.look(model.norm, model.head, model.layers[0])
    side.gradients(model)


def chunked(side, options):
    """The main forward leaves the head out; each chunk's backward follows its own forward."""
    model = wrapped(side.api.fully_shard, **options)
    for step in range(2):
        tokens = tokens_of(step)
        with side.counted():
            hidden = model(tokens)
            side.look(model.norm, model.layers[0])
            leaf = hidden.detach().requires_grad_()
            for part, target in zip(leaf.chunk(4), tokens.chunk(4), strict=True):
                loss = loss_of(model.head(part), target)
                side.look(model.head)
                side.numbers.append(loss.item())
                loss.backward()
            hidden.backward(leaf.grad)
        side.look(model.norm, model.head, model.layers[0])
        side.gradients(model)


def chunks_first(side):
    """All chunks' forwards before the one backward."""
    model = wrapped(side.api.fully_shard)
    tokens = tokens_of()
    with side.counted():
        hidden = model(tokens)
        parts = zip(hidden.chunk(2), tokens.chunk(2), strict=True)
        total = sum(loss_of(model.head(part), target) for part, target in parts)
        side.numbers.append(total.item())
        total.backward()
    side.gradients(model)


def only_evaluated(side):
    model = wrapped(side.api.fully_shard)
    model.set_reshard_after_forward(True, recurse=False)  # ours frees the root without gradients
    with torch.no_grad(), side.counted():
        hidden = model(tokens_of())
        side.numbers.extend(model.head(part).sum().item() for part in hidden.chunk(2))
        side.numbers.append(model(tokens_of(), logits=True).sum().item())
    with side.counted():
        side.numbers.append(model(tokens_of(1), logits=True).sum().item())


def check_against_fsdp2(rank, world_size):
    compare(whole, True)
    compare(whole, False)
    if RUNS_PARTS:
        compare(chunked, {}, fewer=True)
        policy = MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)
        compare(chunked, {"mp_policy": policy}, fewer=True)
        compare(only_evaluated, fewer=True)


def check_chunks_equal_the_whole(rank, world_size):
    """Also where FSDP2 fails: several chunks before one backward, results kept on the module."""
    grads = []
    for how in ("whole", "together", "apart", "on the module"):
        model = wrapped(fully_shard)
        tokens = tokens_of()
        if how == "whole":
            (2 * loss_of(model(tokens, logits=True), tokens)).backward()
        else:
            hidden = model(tokens)
            leaf = hidden.detach().requires_grad_() if how == "apart" else hidden
            total = 0
            for part, target in zip(leaf.chunk(2), tokens.chunk(2), strict=True):
                model.kept = model.head(part)
                loss = loss_of(model.kept, target)
                if how == "apart":
                    loss.backward()
                elif how == "on the module":
                    total = total + loss_of(model.kept, target)
                else:
                    total = total + loss
            if how == "apart":
                hidden.backward(leaf.grad)
            else:
                total.backward()
        grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
        assert all(g.state is State.SHARDED for g in param_groups(model))
    for other in grads[1:]:
        for name, grad in grads[0].items():
            torch.testing.assert_close(other[name], grad, rtol=1e-5, atol=1e-6)


def check_names(rank, world_size):
    model = wrapped(fully_shard)
    unit = unit_of(model.norm)
    assert unit_of(model.head) is unit
    assert unit_of(model.layers[0]) is not unit
    assert isinstance(model.head, FSDPModule)
    groups = {group.name: group for group in param_groups(model)}
    assert list(groups) == ["", "layers.0", "layers.1", "norm, head"]
    (layout,) = [g for g in inspect.layout(model).groups if g.unit == "norm, head"]
    assert [t.name for t in layout.tensors] == ["norm.weight", "norm.bias", "head.weight"]
    assert [t.shape for t in layout.tensors] == [(13,), (13,), (VOCAB, 13)]
    plain = Chunky()
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor().cpu(), value)
    seen = []
    modules = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]
    note = lambda fqn, param: seen.append(fqn) or Elements()  # noqa: E731
    fully_shard([*modules, modules[1][0]], granularity=note)
    assert seen == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert not isinstance(modules[1][0], FSDPModule), "it belongs to the module around it"


def check_copies_and_moves(rank, world_size):
    model = wrapped(fully_shard)
    loss_of(model(tokens_of(), logits=True), tokens_of()).backward()
    model.zero_grad()
    twin = copy.deepcopy(model)
    assert unit_of(twin.norm) is unit_of(twin.head) is not unit_of(model.head)
    for each in (model, twin, model.double(), twin.to(torch.float64)):
        loss_of(each(tokens_of(), logits=True), tokens_of()).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(twin.get_parameter(name).grad, param.grad)
    with pytest.raises(ValueError, match="LayerNorm is not part of what is copied"):
        copy.deepcopy(model.head)
    with torch.device("meta"):
        empty = Chunky()
    fully_shard([empty.norm, empty.head])
    fully_shard(empty)
    empty.to_empty(device=DEVICE)
    empty.load_state_dict(Chunky().state_dict())
    assert empty(tokens_of(), logits=True).isfinite().all()


def check_errors(rank, world_size):
    with pytest.raises(ValueError, match="module is an empty list"):
        fully_shard([])
    with pytest.raises(TypeError, match="the list holds a int"):
        fully_shard([nn.Linear(2, 2), 3])
    with pytest.raises(TypeError, match="module is a dict"):
        fully_shard({})
    with pytest.raises(ValueError, match="ModuleList has no forward"):
        fully_shard([nn.ModuleList([nn.Linear(2, 2)])])
    if world_size > 1:
        pair = [nn.Linear(2, 2), nn.ReLU() if rank else nn.Tanh()]
        with pytest.raises(RuntimeError, match="do not wrap the module alike"):
            fully_shard(pair)
        assert not isinstance(pair[0], FSDPModule)
        assert not isinstance(pair[0].weight, DTensor)


def check_a_list_alone(rank, world_size):
    """Without a root around it."""
    a, b = fully_shard([nn.Linear(3, 3).to(DEVICE), nn.Linear(3, 3).to(DEVICE)])
    for _ in range(2):
        b(a(torch.ones(2, 3, device=DEVICE))).sum().backward()
        assert a.weight.grad is not None
        assert param_groups(a)[0].state is State.SHARDED


def check_all(rank, world_size):
    check_chunks_equal_the_whole(rank, world_size)
    check_names(rank, world_size)
    check_copies_and_moves(rank, world_size)
    check_errors(rank, world_size)
    check_a_list_alone(rank, world_size)


def test_lists_do_what_they_do_in_fsdp2(run_ranks):
    run_ranks(check_against_fsdp2, 2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_list_is_one_unit_with_the_names_of_its_modules(run_ranks, world_size):
    run_ranks(check_all, world_size)
