# SPDX-License-Identifier: Apache-2.0
"""``python -m vescale.fsdp plan``."""

import json

import pytest

from vescale.fsdp.__main__ import main
from vescale.fsdp.inspect.layouts import readable
from vescale.fsdp.simulate import Setup, simulate
from vescale.fsdp.simulate.search import search, smallest_that_fit
from vescale.fsdp.simulate.shapes import Unit, shipped_units

GIB = 2**30


def run(capsys, *arguments):
    status = main(["plan", *map(str, arguments)])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_a_plan_is_printed(capsys):
    status, text, _ = run(capsys, "Llama-3-70B", "--world", 1024, "--hsdp", 64)
    assert status == 0
    for part in (
        "llama3-70b on 1,024 ranks, 16 copies over 64 each; adamw, cut for adamw",
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
    _, text, _ = run(capsys, "gpt-oss-20b", "--world", 64, "--optimizer", "Muon", "--json")
    found = json.loads(text)
    expected = simulate(shipped_units("gpt-oss-20b"), Setup(64, optimizer="muon"))
    assert found["peak_without_activations"] == expected.peak_nbytes
    assert found["units"][1]["count"] == 24
    assert found["warnings"] == []


def test_a_search_marks_the_smallest_group_that_fits(capsys):
    status, text, _ = run(capsys, "gpt-oss-120b", "--world", 256, "--search")
    assert status == 0
    assert text.startswith("gpt-oss-120b on 256 ranks; adamw; stored in float32")
    of_one, of_two = text.partition("units of 1 layer\n")[2].split("units of 2 layers\n")
    (line,) = [line for line in of_one.splitlines() if line.endswith("<-")]
    assert line.split()[0] == "64"
    assert "too large" in of_two
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


def test_a_search_keeps_to_what_is_given(capsys):
    options = ("llama3-8b", "--world", 64, "--search", "--json")
    _, text, _ = run(capsys, *options, "--hsdp", 8)
    found = [(one["shards"], one["layers_per_unit"]) for one in json.loads(text)]
    assert found == [(8, 1), (8, 2), (8, 4)]
    _, text, _ = run(capsys, *options, "--layers", 3)
    assert {one["layers_per_unit"] for one in json.loads(text)} == {3}


def test_units_that_are_the_same_are_tried_once():
    unit = Unit("block", 1, (("w", (64, 64)),))
    assert [one.setup.layers for one in search([unit], Setup(2))] == [1]


def test_a_plan_is_held_against_the_memory(capsys):
    options = ("llama3-8b", "--world", 64, "--memory")
    peak = simulate(shipped_units("llama3-8b"), Setup(64)).peak_nbytes
    status, text, _ = run(capsys, *options, 12)
    assert status == 0
    assert f"fits in 12 GiB: {readable(12 * GIB - peak)} are left for activations" in text
    status, text, _ = run(capsys, *options, 5)
    assert status == 1
    assert f"does not fit in 5 GiB: {readable(peak - 5 * GIB)} too much" in text
    assert "last from step to step; less with more ranks (--world), --optimizer adamw8bit" in text
    assert "buffers of whole units, of head the largest;\n" in text
    status, text, _ = run(capsys, *options, 5, "--json")
    assert status == 1
    assert (json.loads(text)["memory"], json.loads(text)["fits"]) == (5 * GIB, False)


def test_where_nothing_fits_the_closest_is_named(capsys):
    status, text, _ = run(capsys, "llama3-8b", "--world", 64, "--search", "--memory", 1)
    assert status == 1
    assert "nothing fits in 1 GiB; the closest needs 6.029 GiB, 5.029 GiB too much:" in text
    assert "64 ranks to a copy, units of 1 layer, cut for adamw" in text
    assert "of head the largest, too much on any number of ranks" in text
    assert "<-" not in text


def test_json_is_null_where_there_is_nothing_to_tell(capsys, tmp_path):
    _, text, _ = run(capsys, "llama3-8b", "--world", 1, "--json")
    found = json.loads(text)
    assert [name for name, value in found.items() if value is None] == [
        *("memory", "fits", "received_within_copy", "received_from_copies")
    ]
    path = tmp_path / "empty.json"
    path.write_text('{"layers.0.w": [0, 4]}')
    _, text, _ = run(capsys, path, "--world", 2, "--json")
    assert json.loads(text)["padding"] is None
    assert json.loads(text)["units"][0]["padding"] is None


def test_traffic_is_told_of_the_ranks_that_there_are(capsys):
    for ranks, message in (
        ((1,), "receives nothing: it is alone"),
        ((8,), "a step from the ranks of its copy;"),
        ((8, "--hsdp", 1), "a step from others;"),
    ):
        _, text, _ = run(capsys, "llama3-8b", "--world", *ranks)
        assert message in text


@pytest.mark.parametrize("memory", ["0", "-3", "much", "nan", "inf"])
def test_a_wrong_memory_is_refused(capsys, memory):
    with pytest.raises(SystemExit):
        main(["plan", "llama3-8b", "--world", "8", f"--memory={memory}"])
    assert f"'{memory}', expected the GiB of a rank" in capsys.readouterr().err


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


def test_a_picture_of_nothing_has_no_labels_of_zero(capsys, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    (tmp_path / "shapes.json").write_text('{"layers.0.w": [0, 4]}')
    path = tmp_path / "plan.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        run(capsys, tmp_path / "shapes.json", "--world", 2, "--plot", path)
        assert "0 B" not in path.read_text()
        run(capsys, "gpt-oss-20b", "--world", 48, "--lanes", 2, "--plot", path)
    text = path.read_text()
    assert "gpt-oss-20b: 20,9" in text
    assert "lane 1: 48 ranks x " in text


def test_without_matplotlib_the_error_names_the_extra(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.axes", None)
    monkeypatch.delitem(__import__("sys").modules, "vescale.fsdp.simulate.picture", raising=False)
    status, _, error = run(capsys, "llama3-8b", "--world", 8, "--plot", tmp_path / "plan.png")
    assert status == 2
    assert 'pip install "vescale-fsdp[plot]"' in error
