# SPDX-License-Identifier: Apache-2.0
"""``python -m vescale.fsdp plan``."""

import json

import pytest

from vescale.fsdp.__main__ import main
from vescale.fsdp.simulate import Setup, simulate
from vescale.fsdp.simulate.search import search, smallest_that_fit
from vescale.fsdp.simulate.shapes import shipped_units

GIB = 2**30


def run(capsys, *arguments):
    status = main(["plan", *map(str, arguments)])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_a_plan_is_printed(capsys):
    status, text, _ = run(capsys, "Llama-3-70B", "--world", 1024, "--hsdp", 64)
    assert status == 0
    for part in (
        "1,024 ranks, 16 copies over 64 each; adamw, cut for adamw",
        "layer     80    855,654,400",
        "70,553,706,496 elements, padding 0.",
        "optimizer state, at most",
        "multiples of 16 bytes",
    ):
        assert part in text
    assert "warning" not in text


def test_what_forces_padding_is_named(capsys):
    _, text, _ = run(capsys, "Llama-3-70B", "--world", 1024, "--granularity", "rows:128")
    assert "warning: unit layer: blocks of 3,670,016 elements in mlp.down_proj.weight" in text


def test_json_holds_the_same(capsys):
    _, text, _ = run(capsys, "gpt-oss-20b", "--world", 64, "--optimizer", "muon", "--json")
    found = json.loads(text)
    expected = simulate(shipped_units("gpt-oss-20b"), Setup(64, optimizer="muon"))
    assert found["peak_without_activations"] == expected.peak_nbytes
    assert found["units"][1]["count"] == 24
    assert found["warnings"] == []


def test_a_search_marks_the_smallest_group_that_fits(capsys):
    status, text, _ = run(capsys, "gpt-oss-120b", "--world", 256, "--search")
    assert status == 0
    (line,) = [line for line in text.splitlines() if line.startswith("1 ") and "<-" in line]
    assert line.split()[1] == "64"
    assert "too large" in text
    _, text, _ = run(capsys, "gpt-oss-120b", "--world", 256, "--search", "--json", "--memory", 48)
    fitting = [one["shards"] for one in json.loads(text) if one["smallest_that_fits"]]
    assert fitting == [256]


def test_a_search_tries_finer_cuts_where_they_save_padding():
    units = shipped_units("llama3-70b")
    found = search(units, Setup(1024))
    assert any(one.setup.granularity is not None for one in found)
    assert {one.setup.layers for one in found} == {1, 2, 4}
    assert smallest_that_fit(found, 0) == []
    assert all(one.setup.granularity is None for one in search(units, Setup(8)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt-6", "--world", 8), "neither a file nor a model that is known here: deepseek"),
        (("llama3-8b", "--world", 8, "--hsdp", 3), "shards=3 does not divide the 8 ranks"),
        (("llama3-8b", "--world", 0), "world_size=0"),
        (("llama3-8b", "--world", 8, "--lanes", "many"), "lanes='many'"),
    ],
)
def test_what_cannot_be_planned_is_one_line(capsys, arguments, message):
    status, _, error = run(capsys, *arguments)
    assert status == 2
    assert message in error
    assert error.count("\n") == 1


def test_a_wrong_granularity_lists_the_forms(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "llama3-8b", "--world", "8", "--granularity", "columns"])
    assert "elements, rows, rows:N, block:DIMS:N, whole" in capsys.readouterr().err


def test_a_picture_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    for world, model in ((48, "gpt-oss-20b"), (1, "llama3-8b")):
        status, _, _ = run(capsys, model, "--world", world, "--plot", path)
        assert status == 0
        assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.axes", None)
    monkeypatch.delitem(__import__("sys").modules, "vescale.fsdp.simulate.picture", raising=False)
    status, _, error = run(capsys, "llama3-8b", "--world", 8, "--plot", tmp_path / "plan.png")
    assert status == 2
    assert 'pip install "vescale-fsdp[plot]"' in error
