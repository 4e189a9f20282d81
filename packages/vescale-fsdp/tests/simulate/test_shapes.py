# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest

from vescale.fsdp.simulate.shapes import (
    Unit,
    group_by_layer,
    name_of,
    shipped,
    shipped_units,
    units_of,
)

LAYER = {"attention.weight": [6, 4], "norm.weight": [4]}


def flat(layers):
    """Return FQNs and shapes of a model of equal layers, the last one longer."""
    shapes = {"embed.weight": [10, 4]}
    for i in range(layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in LAYER.items()}
    return shapes | {f"layers.{layers - 1}.gate": [2], "head.weight": [10, 4]}


def test_shipped_models_have_their_published_sizes():
    totals = {
        name: sum(u.count * math.prod(s) for u in shipped_units(name) for _, s in u.params)
        for name in shipped()
    }
    assert totals["llama3-8b"] == 8_030_261_248
    assert totals["deepseek-v3-671b-fused"] == totals["deepseek-v3-671b-unfused"]
    assert len(shipped_units("kimi-k2-1t-unfused")[-2].params) > 1000


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Llama-3-70B", "llama3-70b"),
        ("GPT-OSS-120B", "gpt-oss-120b"),
        ("gpt_oss_120b_unfused", "gpt-oss-120b-unfused"),
        ("DeepSeek-V3", "deepseek-v3-671b-fused"),
        ("qwen3-30b", "qwen3-30b-a3b-fused"),
    ],
)
def test_names_are_found_as_people_write_them(given, name):
    assert units_of(given) == shipped_units(name)


@pytest.mark.parametrize("given", ["gpt-6", "", "no/such/file.json"])
def test_unknown_models_list_the_known_ones(given):
    with pytest.raises(ValueError, match=r"llama3-70b, .*a JSON file of shapes"):
        units_of(given)


def test_the_name_of_a_model_is_the_whole_one(tmp_path):
    assert name_of("DeepSeek-V3") == "deepseek-v3-671b-fused"
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(flat(1)))
    assert name_of(str(path)) == str(path)


def test_a_folder_without_a_configuration_says_what_is_expected(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"is a folder without a config\.json.* llama3-70b, "):
        units_of(str(tmp_path))
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ValueError, match=r"config\.json has no model_type, expected a config"):
        units_of(str(tmp_path))
    (tmp_path / "llama3-8b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert units_of("llama3-8b") == shipped_units("llama3-8b")


def test_a_name_that_could_be_several_says_which():
    with pytest.raises(ValueError, match="'llama' could be any of llama3-70b, llama3-8b"):
        units_of("llama")


def test_a_file_of_shapes_is_grouped_by_layer(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(flat(4)))
    layer = tuple((name, tuple(shape)) for name, shape in LAYER.items())
    assert units_of(str(path)) == (
        Unit("layers", 3, layer),
        Unit("layers", 1, (*layer, ("gate", (2,)))),
        Unit("root", 1, (("embed.weight", (10, 4)), ("head.weight", (10, 4)))),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "holds a list"),
        ("{", "is no JSON"),
        ('{"w": 3}', r"'w': 3, expected a list of integers"),
        ('{"w": [3, -1]}', "expected a list of integers"),
        ('{"w": [3, 1.5]}', "expected a list of integers"),
    ],
)
def test_what_is_no_file_of_shapes_is_said_so(tmp_path, text, message):
    path = tmp_path / "shapes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        units_of(str(path))


def test_a_configuration_of_transformers_is_built_on_meta(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=128,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    layers, root = units_of(str(tmp_path))
    assert (layers.name, layers.count, len(layers.params)) == ("model.layers", 3, 9)
    assert dict(root.params)["lm_head.weight"] == (128, 64)


def test_layers_are_merged_into_units():
    unit = Unit("layer", 5, (("w", (2,)),))
    assert unit.merged(1) == (unit,)
    pair = (("0.w", (2,)), ("1.w", (2,)))
    assert unit.merged(2) == (Unit("layer x 2", 2, pair), Unit("layer", 1, (("0.w", (2,)),)))
    assert [(u.count, len(u.params)) for u in unit.merged(8)] == [(1, 5)]


def test_only_the_outermost_list_makes_layers():
    params = [("layers.0.experts.0.w", (2,)), ("layers.0.experts.1.w", (2,))]
    (unit,) = group_by_layer(params)
    assert unit == Unit("layers", 1, (("experts.0.w", (2,)), ("experts.1.w", (2,))))
