# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from testing.models import build
from vescale.dtensor import DTensor
from vescale.fsdp import fully_shard
from vescale.fsdp.fqns import clean_fqn, groups_in, sharded_parameters


def test_names_of_wrappers_are_left_out():
    assert clean_fqn("layers.0.up.weight") == "layers.0.up.weight"
    assert clean_fqn("_orig_mod.layers.0._checkpoint_wrapped_module.up") == "layers.0.up"
    assert clean_fqn("layers._orig_module.up") == "layers._orig_module.up"
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), torch.compile(nn.Linear(2, 2)))
    assert list(sharded_parameters(model)) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_the_sharded_parameters_are_found_while_whole_ones_are_in_place(fake_group):
    fake_group(4)
    model = build(tied=True)
    names = list(dict(model.named_parameters()))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    before = sharded_parameters(model)
    assert list(before) == names
    model.unshard()
    assert not isinstance(model.embed.weight, DTensor)
    assert all(before[name] is param for name, param in sharded_parameters(model).items())
    assert len(list(groups_in(model))) == 1 + len(model.layers)
