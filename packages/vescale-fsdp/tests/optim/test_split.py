# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from vescale.fsdp.optim import Muon, split_params


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.output = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.norm, self.experts = nn.LayerNorm(4), nn.Parameter(torch.zeros(2, 4, 4))


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.table, self.pos_embed = nn.Embedding(8, 4), nn.Parameter(torch.zeros(6, 4))
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.proj, self.lm_head = nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False)
        if tied:
            self.proj.weight = self.table.weight


def names_of(model, params):
    names = {param: name for name, param in model.named_parameters()}
    return [names[param] for param in params]


HIDDEN = [f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("q", "output")]


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_matrices_go_to_muon_and_everything_else_to_rest(tied):
    model = Model(tied)
    muon, rest = split_params(model)
    assert names_of(model, muon) == (HIDDEN if tied else [*HIDDEN, "proj.weight"])
    assert set(muon).isdisjoint(rest)
    assert {*muon, *rest} == set(model.parameters())


def test_names_alone_find_heads_and_named_embeddings():
    shapes = {"embed_tokens.weight": (8, 4), "wte.weight": (8, 4), "model.lm_head.weight": (8, 4)}
    shapes |= {"layers.0.up.weight": (8, 4), "output.weight": (8, 4), "layers.0.up.bias": (8,)}
    named = [(fqn, nn.Parameter(torch.zeros(shape))) for fqn, shape in shapes.items()]
    muon, rest = split_params(named)
    assert muon == [named[3][1]]
    assert len(rest) == 5


def test_a_predicate_overrides_the_rule_where_it_has_an_opinion():
    model = Model(tied=False)
    chosen = {"lm_head.weight": True, "proj.weight": False}
    muon, rest = split_params(model, predicate=lambda fqn, param: chosen.get(fqn))
    assert names_of(model, muon) == [*HIDDEN, "lm_head.weight"]
    assert "proj.weight" in names_of(model, rest)


def test_pairs_with_names_are_returned_on_demand():
    model = Model(tied=True)
    pairs = [
        [(names_of(model, [param])[0], param) for param in part] for part in split_params(model)
    ]
    assert list(split_params(model, named=True)) == pairs
    muon, rest = split_params(model, named=True)
    Muon(muon, matrix_split=lambda fqn, shape: [2, 2] if "q" in fqn else [shape[0]])
    assert torch.optim.AdamW(rest).param_groups[0]["param_names"] == [name for name, _ in rest]


def test_verbose_says_what_went_where_and_why(capsys):
    split_params(Model(tied=False))
    assert capsys.readouterr().out == ""
    split_params(Model(tied=False), verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("rest") and "lm_head.weight  (head)" in line for line in lines)
    assert any("layers.1.q.weight  (hidden matrix)" in line for line in lines)


def test_parameters_without_names_are_refused():
    with pytest.raises(TypeError, match=r"got a Parameter, .*pass the model"):
        split_params(Model(tied=False).parameters())
