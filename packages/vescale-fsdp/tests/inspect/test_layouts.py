# SPDX-License-Identifier: Apache-2.0
"""Layouts as tables and pictures: from plans alone, but for one test on ranks."""

import builtins
import io
import math
import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from testing.ranks import DEVICE
from vescale.fsdp import MixedPrecisionPolicy, Rows, fully_shard, inspect
from vescale.fsdp.inspect.layouts import readable
from vescale.fsdp.lanes import plan_lanes
from vescale.fsdp.planner import Plan, Request, plan

BLOCK = {"norm.weight": (64,), "up.weight": (96, 64), "down.weight": (64, 96)}
ROOT = {"embed.weight": (256, 64), "norm.weight": (64,), "empty": (0, 4)}


@dataclass
class Group:
    name: str
    plan: Plan
    dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype | None = None
    trainable: bool = True


def make_group(name, shapes, world_size, rows=1, *, prefixed=True, **options):
    requests = [
        Request(
            f"{name}.{key}" if name and prefixed else key,
            math.prod(shape),
            rows * shape[-1] if len(shape) > 1 else 1,
        )
        for key, shape in shapes.items()
    ]
    return Group(name, plan(requests, world_size, align=4), **options)


def make_layout(world_size, layers=3, rows=1, prefixed=True):
    groups, shapes = [], {}
    for i in range(layers):
        groups.append(make_group(f"layers.{i}", BLOCK, world_size, rows, prefixed=prefixed))
        shapes |= {f"layers.{i}.{key}": shape for key, shape in BLOCK.items()}
    groups.append(make_group("", ROOT, world_size, rows))
    return inspect.layout_of_groups(groups, shapes | ROOT)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 16)), min_size=1, max_size=6),
    st.integers(1, 9),
)
def test_every_element_is_on_the_ranks_that_the_layout_names(sizes, world_size):
    requests = [Request(f"w{i}", rows * cols, cols) for i, (rows, cols) in enumerate(sizes)]
    layout = inspect.layout_of_groups([Group("", plan(requests, world_size, align=4))])
    (group,) = layout.groups
    for tensor, request in zip(group.tensors, requests, strict=True):
        assert sum(tensor.shard_sizes) == request.numel == tensor.numel
        elements = range(tensor.offset, tensor.offset + tensor.numel)
        owners = sorted({element // group.plan.shard_numel for element in elements})
        assert list(tensor.ranks) == owners
    assert layout.padding == pytest.approx(group.plan.padding)
    assert layout.numel == sum(request.numel for request in requests)


@pytest.mark.parametrize("prefixed", [True, False])
def test_names_and_shapes_are_found_for_full_and_for_relative_names(prefixed):
    layout = make_layout(2, prefixed=prefixed)
    assert [group.unit for group in layout.groups] == ["layers.0", "layers.1", "layers.2", ""]
    for group in layout.groups:
        found = {tensor.name: tensor.shape for tensor in group.tensors}
        assert found == (BLOCK if group.unit else ROOT)


def test_unknown_shapes_are_shown_flat():
    layout = inspect.layout_of_groups([make_group("", BLOCK, 2)])
    assert [tensor.shape for tensor in layout.groups[0].tensors] == [(64,), (6144,), (6144,)]


def test_the_table_names_every_parameter_once_for_units_alike():
    text = str(make_layout(2))
    assert text.count("up.weight") == 1
    assert "layers.0 to layers.2 (3 alike): float32, trained, 2 ranks x" in text
    assert "(root)" in text
    (row,) = (line.split() for line in text.splitlines() if "embed.weight" in line)
    assert row == ["embed.weight", "[256,", "64]", "16,384", "64", "0", "0-1"]
    (row,) = (line.split() for line in text.splitlines() if "empty" in line)
    assert row[-1] == "none"
    assert text.splitlines()[-1] == make_layout(2).summary()
    assert all(line == line.rstrip() for line in text.splitlines())


def test_units_that_differ_in_anything_are_shown_apart():
    same = make_group("a", BLOCK, 2)
    others = [
        make_group("b", BLOCK, 2, rows=32),
        make_group("c", BLOCK, 3),
        make_group("d", BLOCK, 2, trainable=False),
        make_group("e", BLOCK, 2, dtype=torch.bfloat16),
        make_group("f", BLOCK, 2, param_dtype=torch.bfloat16),
    ]
    for other in others:
        assert len(inspect.layout_of_groups([same, other]).runs()) == 2
    twice = inspect.layout_of_groups([same, make_group("b", BLOCK, 2)])
    assert [len(run) for run in twice.runs()] == [2]


def test_bytes_count_the_stored_and_the_gathered_dtype():
    group = make_group("", BLOCK, 2, param_dtype=torch.bfloat16)
    layout = inspect.layout_of_groups([group])
    assert layout.nbytes_per_rank == 4 * group.plan.shard_numel
    assert layout.groups[0].gathered_nbytes == 2 * 2 * group.plan.shard_numel
    assert "float32 gathered as bfloat16" in str(layout)


def test_readable_bytes():
    assert [readable(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40, 5 << 50)] == [
        *("0 B", "1023 B", "1.5 KiB", "5 MiB", "3 TiB", "5120 TiB")
    ]


def test_a_model_without_groups_says_so():
    empty = inspect.layout_of_groups([])
    assert "no parameter here belongs to a module that fully_shard of vescale.fsdp" in str(empty)
    assert "Call fully_shard on the blocks of the model" in str(empty)
    assert (empty.numel, empty.padding, empty.nbytes_per_rank) == (0, 0.0, 0)


def test_rich_prints_the_same_facts():
    console = pytest.importorskip("rich.console").Console(width=100, file=io.StringIO())
    console.print(make_layout(2))
    text = console.file.getvalue()
    for fact in ("layers.0 to layers.2 (3 alike)", "up.weight", "[256, 64]", "16,384", "padding"):
        assert fact in text


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 40), st.sampled_from([1, 32]))
def test_pictures_are_drawn_for_any_world(tmp_path_factory, world_size, rows):
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("plot") / "layout.png"
    inspect.plot(make_layout(world_size, rows=rows), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_pictures_of_nothing_of_mixed_meshes_and_of_lanes_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    mixed = [make_group("a", BLOCK, 2), make_group("experts", BLOCK, 3, trainable=False)]
    lanes = Group("", plan_lanes(mixed[0].plan.requests, 3, align=4, lanes=2))
    for name, groups in (("none.svg", []), ("mixed.svg", mixed), ("lanes.svg", [lanes])):
        inspect.plot(inspect.layout_of_groups(groups), tmp_path / name)
        assert "<svg" in (tmp_path / name).read_text()


def words_of(layout, path):
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # words, not outlines of letters
        inspect.plot(layout, path)
    return re.findall("<text[^>]*>([^<]*)</text>", path.read_text())


def test_pictures_name_the_ranks_of_every_lane_and_mesh(tmp_path):
    requests = [Request("wide", 500 * 96, 32 * 96), Request("tall", 64 * 1000, 1000)]
    lanes = Group("a", plan_lanes(requests, 4, align=4, lanes=2))
    layout = inspect.layout_of_groups([lanes, make_group("b", BLOCK, 3), make_group("c", BLOCK, 3)])
    words = words_of(layout, tmp_path / "lanes.svg")
    assert "float32, 2 lanes" in words
    assert [words.count(f"rank {rank}") for rank in range(4)] == [3, 3, 3, 2]


def test_a_number_is_no_name_of_a_parameter(tmp_path):
    group = make_group("", {"0.weight": (64, 64), "1.weight": (64, 64), "2.weight": (0, 4)}, 2)
    words = words_of(inspect.layout_of_groups([group]), tmp_path / "numbers.svg")
    assert words.count("0.weight") == 2  # in its bar and in the legend
    assert not {"0", "2.weight"} & set(words)


def test_names_of_ranks_do_not_touch():
    picture = pytest.importorskip("vescale.fsdp.picture")
    assert picture.rank_names(2, 0.5) == (["rank 0", "rank 1"], 1)
    assert picture.rank_names(16, 0.02) == ([str(2 * rank) for rank in range(8)], 2)
    assert picture.rank_names(40, 1 / 40)[1] == 3
    assert picture.rank_names(4, 0.001) == ([], 1)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith(("matplotlib", "vescale.fsdp.picture")):
            raise ImportError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r'pip install "vescale-fsdp\[plot\]"'):
        inspect.plot(make_layout(2), tmp_path / "layout.png")


def check_layout_of_a_wrapped_model(rank, world_size):
    model = nn.Sequential(*(nn.Linear(24, 40) for _ in range(2)), nn.Linear(40, 6)).to(DEVICE)
    model[2].bias.requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model[:2]:
        fully_shard(layer, granularity=Rows(8), mp_policy=policy)
    fully_shard(model)
    local = {name: p.to_local().numel() for name, p in model.named_parameters()}

    layout = inspect.layout(model)
    held = {}
    for group in layout.groups:
        for tensor in group.tensors:
            fqn = f"{group.unit}.{tensor.name}".lstrip(".")
            held[fqn] = tensor.shard_sizes[rank]
            parameter = model.get_parameter(fqn)
            assert tensor.shape == tuple(parameter.shape)
            assert group.trainable == parameter.requires_grad
            assert group.plan.world_size == world_size
        assert group.param_dtype == (torch.bfloat16 if group.unit else torch.float32)
    assert held == local
    assert layout.numel == sum(p.numel() for p in model.parameters())
    assert "0 to 1 (2 alike): float32 gathered as bfloat16" in str(layout)
    assert "frozen" in str(layout)

    model[0].unshard()
    assert inspect.layout(model) == layout


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_wrapped_model_holds_what_its_layout_says(run_ranks, world_size):
    run_ranks(check_layout_of_a_wrapped_model, world_size)


def test_a_model_that_is_not_wrapped_has_an_empty_layout():
    assert inspect.layout(nn.Linear(2, 2)).groups == ()
